-- name: take_shared_device
-- Take a device if no live worker has it, or else ask for it; a trainer's request comes before others. mine: whether it is this worker's now.
INSERT INTO rft.shared_device AS t (run_id, machine, device, holder) VALUES (%(run_id)s, %(machine)s, %(device)s, %(worker_id)s)
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

-- name: is_shared_device_wanted (read)
-- Whether another live worker has asked for the device.
SELECT EXISTS (
    SELECT FROM rft.shared_device t JOIN rft.worker w ON w.worker_id = t.wanted_by
    WHERE (t.run_id, t.machine, t.device) = (%(run_id)s, %(machine)s, %(device)s) AND t.wanted_by <> %(worker_id)s AND w.stopped_at IS NULL) AS wanted;

-- name: keeps_shared_device (read)
-- Whether a worker has the device, and no other live worker has asked for it.
SELECT EXISTS (
    SELECT FROM rft.shared_device t
    WHERE (t.run_id, t.machine, t.device) = (%(run_id)s, %(machine)s, %(device)s) AND t.holder = %(worker_id)s
      AND NOT EXISTS (SELECT FROM rft.worker w WHERE w.worker_id = t.wanted_by AND w.worker_id <> t.holder AND w.stopped_at IS NULL)) AS lasts;

-- name: has_shared_device (read)
-- Whether a worker has the device. Another takes it from a worker that was recorded to be gone, also if that was wrong.
SELECT EXISTS (
    SELECT FROM rft.shared_device
    WHERE (run_id, machine, device) = (%(run_id)s, %(machine)s, %(device)s) AND holder = %(worker_id)s) AS mine;

-- name: give_shared_device
-- End a worker's hold: the device goes to the worker that has asked for it, or to none.
UPDATE rft.shared_device t
SET holder = (SELECT w.worker_id FROM rft.worker w WHERE w.worker_id = t.wanted_by AND w.worker_id <> %(worker_id)s AND w.stopped_at IS NULL),
    wanted_by = NULL, since = clock_timestamp()
WHERE (t.run_id, t.machine, t.device) = (%(run_id)s, %(machine)s, %(device)s) AND t.holder = %(worker_id)s;

-- name: waive_shared_device
-- Withdraw a worker's request for the device.
UPDATE rft.shared_device SET wanted_by = NULL
WHERE (run_id, machine, device) = (%(run_id)s, %(machine)s, %(device)s) AND wanted_by = %(worker_id)s;
