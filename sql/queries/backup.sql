-- name: holds_a_buffer
-- Whether the database holds a buffer.
SELECT to_regnamespace('rft') IS NOT NULL AS found;

-- name: export_snapshot
-- What this transaction sees, for another session to see the same.
SELECT pg_export_snapshot() AS snapshot;
