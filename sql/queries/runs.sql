-- name: lock_run_names
-- Wait for other sessions that are naming a run.
SELECT rft.take_lock('names of runs');

-- name: insert_run
-- Store a run. A number is appended to the name if it is taken.
INSERT INTO rft.run (name, mode, config, seed, planned_steps, pipeline_version, parent_run_id)
SELECT CASE WHEN n.taken = 0 THEN %(name)s ELSE %(name)s || '-' || (n.highest + 1) END,
       %(mode)s, %(config)s, %(seed)s, %(planned_steps)s, %(pipeline_version)s, %(parent_run_id)s
FROM (SELECT count(*) FILTER (WHERE name = %(name)s) AS taken,
             coalesce(max(substring(name FROM length(%(name)s) + 2)::numeric) FILTER (WHERE name <> %(name)s), 1) AS highest
      FROM rft.run WHERE name = %(name)s OR (starts_with(name, %(name)s || '-') AND substring(name FROM length(%(name)s) + 2) ~ '^[0-9]+$')) n
RETURNING *;

-- name: find_run (read)
-- The run of an id, or by_name of a name or an id, the name first.
SELECT * FROM rft.run WHERE run_id::text = %(run)s OR (%(by_name)s AND name = %(run)s) ORDER BY name = %(run)s DESC;

-- name: runs (read)
-- Runs, newest first: all or those of a configured name, with or without imported ones, all or those with a live process. The name in the
-- configuration decides, because the run's own name may be numbered, but so may another experiment's; a run stored without a
-- configuration is found by its own name. A replay reads a run and does not count as its process.
SELECT r.* FROM rft.run r
WHERE (%(name)s::text IS NULL OR coalesce(r.config -> 'run' ->> 'name', r.name) = %(name)s)
  AND (%(imported)s OR NOT jsonb_exists(r.config, 'import'))
  AND (NOT %(at_work)s OR EXISTS (
    SELECT FROM rft.worker w
    WHERE w.run_id = r.run_id AND w.stopped_at IS NULL AND w.role <> 'replay' AND w.heartbeat_at > rft.clock() - interval '15 s'))
ORDER BY r.run_id DESC LIMIT %(limit)s;

-- name: run_names (read)
-- The names of the newest runs.
SELECT name FROM rft.run ORDER BY run_id DESC LIMIT 50;

-- name: run_state (read)
-- The state that every role checks between two pieces of work.
SELECT stop_requested, status IN ('finished', 'interrupted', 'failed') AS has_ended FROM rft.run WHERE run_id = %(run_id)s;

-- name: request_stop
-- Ask the roles of a run to stop.
UPDATE rft.run SET stop_requested = true WHERE run_id = %(run_id)s;

-- name: set_run_config
-- Store the settings with which a resumed run continues.
UPDATE rft.run SET config = %(config)s, planned_steps = %(planned_steps)s, pipeline_version = %(pipeline_version)s,
    status = 'created', stop_requested = false, outcome = NULL, finished_at = NULL
WHERE run_id = %(run_id)s;

-- name: lock_run_state
-- Lock a run that is to end, so that the next statement sees a purge that held it. Fenced transactions need not end first.
SELECT run_id FROM rft.run WHERE run_id = %(run_id)s FOR NO KEY UPDATE;

-- name: finish_run
-- Finish a run. A finished run stays finished, whatever happens to its processes afterwards. An error that may quote what was purged since its
-- attempt began is not stored.
UPDATE rft.run r SET status = %(status)s::rft.run_status, finished_at = clock_timestamp(),
    outcome = CASE WHEN %(status)s::rft.run_status = 'failed' AND rft.was_purged_since(run_id, NULL, coalesce(
        (SELECT a.started_at FROM rft.run_attempt a WHERE a.attempt_id = r.current_attempt_id), created_at)) THEN '[purged]' ELSE %(outcome)s::text END
WHERE run_id = %(run_id)s AND status <> 'finished';

-- name: lock_run
-- The run, locked.
SELECT * FROM rft.run WHERE run_id = %(run_id)s FOR UPDATE;

-- name: limit_idleness
-- Let the server end the current transaction if its process is suspended.
SELECT set_config('idle_in_transaction_session_timeout', '2s', true);

-- name: fence
-- One row while the attempt still holds the run. A takeover locks the run FOR UPDATE and so waits for the fenced transaction, a request to
-- stop does not; the limit keeps the takeover from waiting for a suspended process.
SELECT set_config('idle_in_transaction_session_timeout', '2s', true)
FROM rft.run WHERE run_id = %(run_id)s AND current_attempt_id = %(attempt_id)s FOR KEY SHARE;

-- name: holds_run (read)
-- Whether an attempt still holds its run.
SELECT current_attempt_id = %(attempt_id)s AS held FROM rft.run WHERE run_id = %(run_id)s;

-- name: attempt_holder (read)
-- An attempt, and whether its lease is still valid.
SELECT a.*, a.ended_at IS NULL AND a.lease_until > rft.clock() AS alive FROM rft.run_attempt a WHERE attempt_id = %(attempt_id)s;

-- name: last_checkpoint (read)
-- The newest usable checkpoint on an attempt's history, of a step if one is given.
SELECT c.* FROM rft.v_attempt_history h
JOIN rft.checkpoint c ON c.attempt_id = h.attempt_id AND (h.last_step IS NULL OR c.trainer_step <= h.last_step)
WHERE h.history_id = %(attempt_id)s AND c.deleted_at IS NULL AND (%(step)s::bigint IS NULL OR c.trainer_step = %(step)s)
ORDER BY c.trainer_step DESC, c.checkpoint_id DESC LIMIT 1;

-- name: insert_attempt
-- Store a new attempt, which holds the lease.
INSERT INTO rft.run_attempt (run_id, parent_attempt_id, from_checkpoint_id, host, pid, pid_space, pid_started, lease_until, receipt)
VALUES (%(run_id)s, %(parent_attempt_id)s, %(from_checkpoint_id)s, %(host)s, %(pid)s, %(pid_space)s, %(pid_started)s,
    rft.clock() + %(lease_s)s * interval '1 s', %(receipt)s)
RETURNING *;

-- name: take_run
-- Make an attempt the one that may draw, publish and checkpoint.
UPDATE rft.run SET current_attempt_id = %(attempt_id)s, status = 'running', stop_requested = false WHERE run_id = %(run_id)s;

-- name: renew_attempt
-- Renew the lease of an attempt.
UPDATE rft.run_attempt SET lease_until = rft.clock() + %(lease_s)s * interval '1 s' WHERE attempt_id = %(attempt_id)s AND ended_at IS NULL;

-- name: end_attempt
-- End an attempt and release its lease.
UPDATE rft.run_attempt SET ended_at = clock_timestamp(), lease_until = rft.clock(), outcome = %(outcome)s WHERE attempt_id = %(attempt_id)s;

-- name: end_attempt_of_receipt
-- End an attempt whose process could not go on after it had started it.
UPDATE rft.run_attempt SET ended_at = clock_timestamp(), lease_until = rft.clock(), outcome = %(outcome)s
WHERE run_id = %(run_id)s AND receipt = %(receipt)s AND ended_at IS NULL;

-- name: return_draws
-- After a crash: make groups drawable again that were drawn after the checkpoint, by attempts that this history leaves there.
SELECT rft.return_draws(%(run_id)s, %(attempt_id)s);

-- name: bound_policy_steps
-- Groups sampled by policies after the checkpoint, which this history does not contain, age from the checkpoint on.
UPDATE rft.worklist SET policy_step = %(start_step)s
WHERE run_id = %(run_id)s AND consumer = 'trainer' AND policy_step > %(start_step)s AND policy_step < 2147483647;

-- name: return_aged
-- Reopen groups that aged out: ageing out is an event of an attempt, so going back undoes it.
WITH locked AS (
    SELECT group_id FROM rft.rollout_group
    WHERE run_id = %(run_id)s AND aged_out ORDER BY group_id FOR UPDATE),
back AS (
    UPDATE rft.rollout_group g SET trainable = true, closed_reason = NULL, aged_out = false FROM locked l WHERE g.group_id = l.group_id
    RETURNING g.group_id)
UPDATE rft.worklist w SET available = true FROM back
WHERE w.run_id = %(run_id)s AND w.consumer = 'trainer' AND w.item_kind = 'group' AND w.item_id = back.group_id;

-- name: insert_run_models
-- Record the models with which a run starts or continues; those that are recorded already stay as they are. A folder that several
-- checkpoints had is the newest one's.
INSERT INTO rft.run_model (run_id, used_as, uri, checkpoint_id)
SELECT %(run_id)s, m.used_as::rft.model_use, m.uri,
       (SELECT max(c.checkpoint_id) FROM rft.checkpoint c WHERE c.uri = m.uri AND c.deleted_at IS NULL)
FROM unnest(%(used_as)s::text[], %(uris)s::text[]) AS m (used_as, uri)
ON CONFLICT DO NOTHING;

-- name: models_of_run (read)
-- The models of a run.
SELECT used_as::text AS used_as, uri, trained_by, trainer_step FROM rft.v_run_model WHERE run_id = %(run_id)s ORDER BY used_as, since, uri;
