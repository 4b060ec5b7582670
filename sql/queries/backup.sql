-- name: export_snapshot
-- What this transaction sees, for another session to see the same.
SELECT pg_export_snapshot() AS snapshot;
