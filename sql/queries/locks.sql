-- name: hold_lock
-- Take a lock across transactions. held_by: who holds it instead; NULL if it was free.
SELECT held_by, held_key FROM rft.hold_lock(%(name)s, %(run_id)s, %(object)s, %(holder)s, %(key)s);

-- name: wait_for_holder
-- Wait for the end of a holder. The lock that this takes means nothing, and ends with the transaction.
SELECT pg_advisory_xact_lock_shared(%(key)s);

-- name: release_lock
-- Release a lock that is held across transactions.
WITH free AS (UPDATE rft.lock SET holder = NULL, pid = NULL, key = NULL, taken_at = NULL
    WHERE (name, run_id, object) = (%(name)s, %(run_id)s, %(object)s) AND key = %(key)s)
SELECT pg_advisory_unlock(%(key)s);
