-- name: notify
-- Wake everybody who listens to one of the topics; the payload is constant, so that equal ones of a transaction are one.
SELECT pg_notify(topic, '') FROM unnest(%(topics)s::text[]) AS topic;
