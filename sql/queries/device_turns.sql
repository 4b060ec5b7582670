-- name: take_device_turn
-- Take the turn on a device if no live worker has it, or else ask for the next one, which a trainer has before others. mine: whether it is this worker's now.
INSERT INTO rft.device_turn AS t (run_id, machine, device, holder) VALUES (%(run_id)s, %(machine)s, %(device)s, %(worker_id)s)
ON CONFLICT (run_id, machine, device) DO UPDATE SET
    holder = CASE WHEN EXISTS (SELECT FROM rft.worker w WHERE w.worker_id = t.holder AND w.stopped_at IS NULL) THEN t.holder ELSE excluded.holder END,
    wanted_by = CASE
        WHEN t.holder = excluded.holder OR NOT EXISTS (SELECT FROM rft.worker w WHERE w.worker_id = t.holder AND w.stopped_at IS NULL)
            THEN nullif(t.wanted_by, excluded.holder)
        WHEN EXISTS (SELECT FROM rft.worker w WHERE w.worker_id = t.wanted_by AND w.stopped_at IS NULL)
            AND NOT EXISTS (SELECT FROM rft.worker w WHERE w.worker_id = excluded.holder AND w.role = 'trainer') THEN t.wanted_by
        ELSE excluded.holder END,
    since = CASE WHEN EXISTS (SELECT FROM rft.worker w WHERE w.worker_id = t.holder AND w.stopped_at IS NULL) THEN t.since ELSE clock_timestamp() END
RETURNING t.holder = %(worker_id)s AS mine;

-- name: is_device_turn_wanted (read)
-- Whether another live worker has asked for the turn.
SELECT EXISTS (
    SELECT FROM rft.device_turn t JOIN rft.worker w ON w.worker_id = t.wanted_by
    WHERE (t.run_id, t.machine, t.device) = (%(run_id)s, %(machine)s, %(device)s) AND t.wanted_by <> %(worker_id)s AND w.stopped_at IS NULL) AS wanted;

-- name: device_turn_lasts (read)
-- Whether a worker has the turn, and no other live worker has asked for it.
SELECT EXISTS (
    SELECT FROM rft.device_turn t
    WHERE (t.run_id, t.machine, t.device) = (%(run_id)s, %(machine)s, %(device)s) AND t.holder = %(worker_id)s
      AND NOT EXISTS (SELECT FROM rft.worker w WHERE w.worker_id = t.wanted_by AND w.worker_id <> t.holder AND w.stopped_at IS NULL)) AS lasts;

-- name: has_device_turn (read)
-- Whether a worker has the turn. Another takes it from a worker that was recorded to be gone, also if that was wrong.
SELECT EXISTS (
    SELECT FROM rft.device_turn
    WHERE (run_id, machine, device) = (%(run_id)s, %(machine)s, %(device)s) AND holder = %(worker_id)s) AS mine;

-- name: give_device_turn
-- End a worker's turn: it is that of the worker that has asked for it, or of none.
UPDATE rft.device_turn t
SET holder = (SELECT w.worker_id FROM rft.worker w WHERE w.worker_id = t.wanted_by AND w.worker_id <> %(worker_id)s AND w.stopped_at IS NULL),
    wanted_by = NULL, since = clock_timestamp()
WHERE (t.run_id, t.machine, t.device) = (%(run_id)s, %(machine)s, %(device)s) AND t.holder = %(worker_id)s;

-- name: waive_device_turn
-- Take back a worker's wish for the next turn.
UPDATE rft.device_turn SET wanted_by = NULL
WHERE (run_id, machine, device) = (%(run_id)s, %(machine)s, %(device)s) AND wanted_by = %(worker_id)s;
