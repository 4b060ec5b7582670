-- name: holds_a_buffer (read)
-- Whether the database holds a buffer.
SELECT to_regnamespace('rft') IS NOT NULL AS found;

-- name: export_snapshot
-- Export this transaction's snapshot, so that another session can use the same.
SELECT pg_export_snapshot() AS snapshot;
