-- name: notify
-- Wake all listeners of the topics. The payload is constant, so that equal notifications of a transaction become one.
SELECT pg_notify(topic, '') FROM unnest(%(topics)s::text[]) AS topic;

-- name: abort_idle_transactions
-- Let the server end this session when it does nothing for so long within a transaction, because its process is suspended.
SELECT set_config('idle_in_transaction_session_timeout', %(limit_ms)s::text, false);

-- name: prepare_session
-- Let the server end this session, and release its locks, once its client cannot be reached any more (over TCP; elsewhere it has no effect).
-- Without the compiler, which packaged servers use by default: it takes longer for a plan than our queries gain by it (two files of tests on
-- PostgreSQL 15: 37 s with it, 13 s without).
SELECT set_config('jit', 'off', false),
       set_config('tcp_keepalives_idle', %(idle)s::text, false), set_config('tcp_keepalives_interval', %(interval)s::text, false),
       set_config('tcp_keepalives_count', %(count)s::text, false), set_config('tcp_user_timeout', %(limit)s::text, false);
