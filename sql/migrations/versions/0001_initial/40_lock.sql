-- Locks. Every account that may connect can take any advisory lock, so none of ours is one: a lock is a row, which only accounts that may
-- write can lock or fill. docs/decisions/0016 describes why a lock of minutes must not be an open transaction.

CREATE TABLE rft.lock (
    name text NOT NULL,
    run_id bigint NOT NULL DEFAULT 0,
    object text NOT NULL DEFAULT '',
    holder text,
    pid integer,
    key bigint,
    taken_at timestamptz,
    PRIMARY KEY (name, run_id, object),
    CHECK (num_nulls(holder, pid, key, taken_at) IN (0, 4))
);
COMMENT ON TABLE rft.lock IS 'A lock, named by what is done under it, the run and the object. It is held for a transaction by locking the row, and across transactions by the session that the row names.';
COMMENT ON COLUMN rft.lock.name IS 'What only one process does at a time, such as plan, draw, replay or compaction.';
COMMENT ON COLUMN rft.lock.run_id IS 'The run for which it is done; 0: for the whole buffer.';
COMMENT ON COLUMN rft.lock.object IS 'The taskset or the pipeline version for which it is done; empty: for all of the run, or of the buffer.';
COMMENT ON COLUMN rft.lock.holder IS 'Who holds or held it across transactions, for messages; NULL: free.';
COMMENT ON COLUMN rft.lock.pid IS 'The holder''s process on the server; NULL: free.';
COMMENT ON COLUMN rft.lock.key IS 'A random number: while that process holds the advisory lock of this key, it holds the lock. Another process that gets the key holds nothing.';
COMMENT ON COLUMN rft.lock.taken_at IS 'When the holder took it; NULL: free.';

CREATE FUNCTION rft.take_lock(of_name text, of_run bigint DEFAULT 0, of_object text DEFAULT '') RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
    PERFORM FROM rft.lock WHERE (name, run_id, object) = (of_name, of_run, of_object) FOR UPDATE;
    IF NOT FOUND THEN
        INSERT INTO rft.lock (name, run_id, object) VALUES (of_name, of_run, of_object) ON CONFLICT DO NOTHING;
        PERFORM FROM rft.lock WHERE (name, run_id, object) = (of_name, of_run, of_object) FOR UPDATE;
    END IF;
END
$$;
COMMENT ON FUNCTION rft.take_lock(text, bigint, text) IS 'Waits for a lock and holds it until the transaction ends.';

CREATE FUNCTION rft.try_lock(of_name text, of_run bigint DEFAULT 0, of_object text DEFAULT '') RETURNS boolean
LANGUAGE plpgsql
AS $$
DECLARE
    waits text;
BEGIN
    PERFORM FROM rft.lock WHERE (name, run_id, object) = (of_name, of_run, of_object) FOR UPDATE SKIP LOCKED;
    IF FOUND THEN
        RETURN true;
    ELSIF EXISTS (SELECT FROM rft.lock WHERE (name, run_id, object) = (of_name, of_run, of_object)) THEN
        RETURN false;
    END IF;
    -- The first use of a lock. A transaction that has inserted it and not ended holds the lock, and the server knows no INSERT that does not wait for it.
    waits := current_setting('lock_timeout');
    BEGIN
        PERFORM set_config('lock_timeout', '1ms', true);
        INSERT INTO rft.lock (name, run_id, object) VALUES (of_name, of_run, of_object) ON CONFLICT DO NOTHING;
        PERFORM set_config('lock_timeout', waits, true);
    EXCEPTION WHEN lock_not_available THEN  -- with the block, the setting is as before
        RETURN false;
    END;
    PERFORM FROM rft.lock WHERE (name, run_id, object) = (of_name, of_run, of_object) FOR UPDATE SKIP LOCKED;
    RETURN FOUND;
END
$$;
COMMENT ON FUNCTION rft.try_lock(text, bigint, text) IS 'Takes a lock until the transaction ends, if it is free; returns whether it did. Does not wait for a holder.';

CREATE FUNCTION rft.hold_lock(of_name text, of_run bigint, of_object text, of_holder text, of_key bigint, OUT held_by text, OUT held_key bigint)
LANGUAGE plpgsql
AS $$
BEGIN
    PERFORM rft.take_lock(of_name, of_run, of_object);
    SELECT l.holder, l.key INTO held_by, held_key FROM rft.lock l
    WHERE (l.name, l.run_id, l.object) = (of_name, of_run, of_object) AND EXISTS (
        SELECT FROM pg_locks p JOIN pg_database d ON d.oid = p.database
        WHERE d.datname = current_database() AND p.locktype = 'advisory' AND p.granted AND p.mode = 'ExclusiveLock' AND p.objsubid = 1
          AND p.pid = l.pid AND (p.classid::bigint << 32 | p.objid::bigint) = l.key);
    IF NOT FOUND THEN
        PERFORM pg_advisory_lock(of_key);  -- free, because the key is random
        UPDATE rft.lock SET holder = of_holder, pid = pg_backend_pid(), key = of_key, taken_at = clock_timestamp()
        WHERE (name, run_id, object) = (of_name, of_run, of_object);
    END IF;
END
$$;
COMMENT ON FUNCTION rft.hold_lock(text, bigint, text, text, bigint) IS 'Takes a lock until the session ends or releases it, if it is free; otherwise returns who holds it, and the key that its end releases.';
