-- name: notify
-- Wake all listeners of the topics. The payload is constant, so that equal notifications of a transaction become one.
SELECT pg_notify(topic, '') FROM unnest(%(topics)s::text[]) AS topic;
