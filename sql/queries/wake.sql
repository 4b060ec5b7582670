-- name: notify
-- Wake all listeners of the topics. The payload is constant, so that equal notifications of a transaction become one.
SELECT pg_notify(topic, '') FROM unnest(%(topics)s::text[]) AS topic;

-- name: notice_lost_client
-- Let the server end this session, and release its locks, once its client cannot be reached any more.
SELECT set_config('tcp_keepalives_idle', %(idle)s::text, false), set_config('tcp_keepalives_interval', %(interval)s::text, false),
       set_config('tcp_keepalives_count', %(count)s::text, false), set_config('tcp_user_timeout', %(limit)s::text, false);
