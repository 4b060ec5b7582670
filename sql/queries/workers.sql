-- name: insert_worker
-- Register a process; return its id.
INSERT INTO rft.worker (run_id, role, host, pid, pid_space, pid_started)
VALUES (%(run_id)s, %(role)s, %(host)s, %(pid)s, %(pid_space)s, %(pid_started)s) RETURNING worker_id;

-- name: count_worker_from
-- Count the life of a worker from the time at which its process began to work for the run, some seconds before it registered.
UPDATE rft.worker SET started_at = clock_timestamp() - %(age_s)s * interval '1 s' WHERE worker_id = %(worker_id)s;

-- name: newest_worker_of_process (read)
-- The id of the last worker that a process has registered in a role; 0 if there is none.
SELECT coalesce(max(worker_id), 0) AS worker_id FROM rft.worker
WHERE (run_id, role, host, pid, pid_space, pid_started) = (%(run_id)s, %(role)s, %(host)s, %(pid)s, %(pid_space)s, %(pid_started)s);

-- name: heartbeat
-- Record that a process is alive, and what it does. If another process has recorded that it is gone, that was wrong. What it waits for is
-- stored without the error after a colon, if that may quote what was purged since the process began.
UPDATE rft.worker SET heartbeat_at = rft.clock(), state = %(state)s, progress = %(progress)s,
    waiting_for = CASE WHEN strpos(%(waiting_for)s::text, ': ') > 0 AND rft.was_purged_since(run_id, NULL, started_at)
                       THEN split_part(%(waiting_for)s::text, ': ', 1) ELSE %(waiting_for)s::text END,
    stopped_at = CASE WHEN error = 'the process is gone' THEN NULL ELSE stopped_at END, error = nullif(error, 'the process is gone')
WHERE worker_id = %(worker_id)s;

-- name: store_spans
-- Store what a worker did since its last heartbeat; the first of the spans may be there, shorter. Ages are seconds before now.
INSERT INTO rft.worker_span AS w (worker_id, ordinal, activity, detail, started_at, ended_at)
SELECT %(worker_id)s, s.ordinal, s.activity, s.detail, c.now - s.start_age * interval '1 s', c.now - s.end_age * interval '1 s'
FROM (SELECT rft.clock() AS now) c,
     unnest(%(ordinals)s::integer[], %(activities)s::text[], %(details)s::text[], %(start_ages)s::double precision[], %(end_ages)s::double precision[])
         AS s (ordinal, activity, detail, start_age, end_age)
ON CONFLICT (worker_id, ordinal) DO UPDATE SET ended_at = excluded.ended_at;

-- name: renew_claims
-- Extend the claims of a live worker. Every condition names the run, so that indexes lead to the run's open rows. Rows that another
-- session is finishing are skipped: locking them in another order could deadlock.
WITH groups AS (
    UPDATE rft.rollout_group SET lease_until = rft.clock() + %(lease_s)s * interval '1 s'
    WHERE group_id IN (
        SELECT group_id FROM rft.rollout_group WHERE run_id = %(run_id)s AND claimed_by = %(worker_id)s AND status = 'claimed'
        FOR UPDATE SKIP LOCKED)),
evaluations AS (
    UPDATE rft.evaluation SET lease_until = rft.clock() + %(lease_s)s * interval '1 s'
    WHERE run_id = %(run_id)s AND claimed_by = %(worker_id)s AND status = 'claimed')
UPDATE rft.worklist w SET lease_until = rft.clock() + %(lease_s)s * interval '1 s'
FROM (
    SELECT run_id, consumer, item_kind, item_id FROM rft.worklist
    WHERE run_id = %(run_id)s AND consumer = 'pipeline' AND claimed_by = %(worker_id)s AND NOT available
    FOR UPDATE SKIP LOCKED) mine
WHERE (w.run_id, w.consumer, w.item_kind, w.item_id) = (mine.run_id, mine.consumer, mine.item_kind, mine.item_id);

-- name: lock_worker
-- Lock a worker, so that the next statement sees a purge that held it.
SELECT worker_id FROM rft.worker WHERE worker_id = %(worker_id)s FOR UPDATE;

-- name: stop_worker
-- Record that a process has ended, even if another process has recorded meanwhile that it is gone. An error that may quote what was purged
-- since the process began is not stored.
UPDATE rft.worker SET stopped_at = coalesce(stopped_at, clock_timestamp()), state = 'stopped', waiting_for = NULL,
    error = CASE WHEN %(error)s::text <> 'the process is gone' AND rft.was_purged_since(run_id, NULL, started_at) THEN '[purged]' ELSE %(error)s END
WHERE worker_id = %(worker_id)s AND (stopped_at IS NULL OR error = 'the process is gone');

-- name: lock_workers_of_process
-- Lock the workers with a process id, so that the next statement sees a purge that held them.
SELECT worker_id FROM rft.worker
WHERE run_id = %(run_id)s AND (host, pid, pid_space) = (%(host)s, %(pid)s, %(pid_space)s) ORDER BY worker_id FOR UPDATE;

-- name: end_worker_of_process
-- Record why a process ended, for the last worker with its process id, even if another process has recorded meanwhile that it is gone. An error
-- that may quote what was purged since the process began is not stored. crashed: whether the work it held may be the reason.
UPDATE rft.worker SET stopped_at = coalesce(stopped_at, clock_timestamp()), state = 'stopped', waiting_for = NULL, crashed = %(crashed)s,
    error = CASE WHEN rft.was_purged_since(run_id, NULL, started_at) THEN '[purged]' ELSE %(error)s END
WHERE worker_id = (
    SELECT max(worker_id) FROM rft.worker
    WHERE run_id = %(run_id)s AND (host, pid, pid_space) = (%(host)s, %(pid)s, %(pid_space)s))
  AND (stopped_at IS NULL OR error = 'the process is gone');

-- name: finished_work (read)
-- Amount of work that each role has finished, which shows whether a restarted role makes progress. Work set aside after crashes counts.
SELECT (SELECT count(*) FROM rft.rollout_group WHERE run_id = %(run_id)s AND sealed_at IS NOT NULL)
       + (SELECT count(*) FROM rft.evaluation WHERE run_id = %(run_id)s AND status IN ('done', 'failed')) AS explorer,
       (SELECT count(*) FROM rft.rollout_group WHERE run_id = %(run_id)s AND ready_at IS NOT NULL)
       + (SELECT count(*) FROM rft.worklist WHERE run_id = %(run_id)s AND consumer = 'pipeline' AND num_lost >= 4) AS pipeline,
       (SELECT count(*) FROM rft.train_step WHERE run_id = %(run_id)s) AS trainer;

-- name: work_of_process (read)
-- Amount of work that the last worker of a process has finished.
SELECT (SELECT count(*) FROM rft.rollout_group g WHERE g.run_id = w.run_id AND g.claimed_by = w.worker_id AND g.sealed_at IS NOT NULL)
       + (SELECT count(*) FROM rft.evaluation e WHERE e.run_id = w.run_id AND e.claimed_by = w.worker_id AND e.status = 'done')
       + coalesce((w.progress->>'groups_decided')::bigint, 0) AS num
FROM rft.worker w WHERE w.run_id = %(run_id)s AND (w.host, w.pid, w.pid_space) = (%(host)s, %(pid)s, %(pid_space)s) ORDER BY w.worker_id DESC LIMIT 1;

-- name: succeeded_rollouts (read)
-- The rollouts and evaluations of a run that succeeded. Work that was set aside does not count.
SELECT (SELECT count(*) FROM rft.rollout o JOIN rft.rollout_group g USING (group_id) WHERE g.run_id = %(run_id)s AND o.outcome = 'ok')
       + (SELECT count(*) FROM rft.evaluation WHERE run_id = %(run_id)s AND status = 'done') AS num;

-- name: ends_of_pipeline_workers (read)
-- Why pipeline workers of a run ended early, the newest first.
SELECT error FROM rft.worker WHERE run_id = %(run_id)s AND role = 'pipeline' AND error IS NOT NULL ORDER BY worker_id DESC LIMIT 100;

-- name: live_workers (read)
-- The processes of a run that have not stopped, and whether their heartbeat is recent.
SELECT worker_id, role::text AS role, host, pid, pid_space, pid_started, heartbeat_at > rft.clock() - interval '15 s' AS beats
FROM rft.worker WHERE run_id = %(run_id)s AND stopped_at IS NULL;

-- name: release_lost_claims
-- Release the work of workers that left or fell silent; a higher claim token fences the old holder. Work on which three explorers
-- crashed is not released: the group is sealed with a failed rollout for each missing one, or the evaluation fails. A worker that was
-- killed, lost with its machine or suspended does not count against the work it held.
WITH lost AS (
    SELECT l.group_id, w.crashed, w.crashed AND l.num_lost >= 2 AS is_last, split_part(w.error, E'\n', 1) AS error
    FROM rft.rollout_group l JOIN rft.worker w ON w.worker_id = l.claimed_by
    WHERE l.run_id = %(run_id)s AND l.status = 'claimed' AND (w.stopped_at IS NOT NULL OR l.lease_until < rft.clock())
    FOR UPDATE OF l SKIP LOCKED),
groups AS (
    UPDATE rft.rollout_group g
    SET status = CASE WHEN l.is_last THEN 'sealed' ELSE 'planned' END::rft.group_status, num_lost = g.num_lost + l.crashed::integer,
        sealed_at = CASE WHEN l.is_last THEN clock_timestamp() END, claimed_by = NULL, lease_until = NULL,
        claim_token = g.claim_token + 1
    FROM lost l WHERE g.group_id = l.group_id
    RETURNING g.group_id, g.run_id, g.attempt_id, g.task_id, g.explore_step, g.ordinal, g.group_size, g.status, g.num_lost, l.error),
sealed AS (SELECT * FROM groups WHERE status = 'sealed'),
unfinished AS (DELETE FROM rft.partial_tokens p USING sealed WHERE p.group_id = sealed.group_id),
failed AS (
    INSERT INTO rft.rollout (group_id, rollout_index, outcome, num_turns, seconds, error)
    SELECT s.group_id, i, 'failed', 0, 0, format('the explorer did not survive this group %%s times: %%s', s.num_lost, s.error)
    FROM sealed s CROSS JOIN generate_series(0, s.group_size - 1) AS i
    WHERE NOT EXISTS (SELECT FROM rft.rollout o WHERE o.group_id = s.group_id AND o.rollout_index = i)),
observed AS (
    INSERT INTO rft.task_observation (run_id, attempt_id, ordinal, task_id, successes, trials)
    SELECT run_id, attempt_id, ordinal, task_id, 0, 0 FROM sealed),
queued AS (
    INSERT INTO rft.worklist (run_id, consumer, item_kind, item_id, sort_key)
    SELECT run_id, 'pipeline', 'group', group_id, explore_step::bigint << 32 | ordinal FROM sealed),
evaluations AS (
    UPDATE rft.evaluation e
    SET status = CASE WHEN w.crashed AND e.num_lost >= 2 THEN 'failed' ELSE 'planned' END::rft.evaluation_status,
        num_lost = e.num_lost + w.crashed::integer,
        error = CASE WHEN w.crashed AND e.num_lost >= 2 THEN format('the explorer did not survive this evaluation %%s times: %%s',
            e.num_lost + 1, split_part(w.error, E'\n', 1)) END,
        finished_at = CASE WHEN w.crashed AND e.num_lost >= 2 THEN clock_timestamp() END, claimed_by = NULL, lease_until = NULL
    FROM rft.worker w
    WHERE e.run_id = %(run_id)s AND e.status = 'claimed' AND w.worker_id = e.claimed_by
      AND (w.stopped_at IS NOT NULL OR e.lease_until < rft.clock())
    RETURNING 1),
items AS (
    UPDATE rft.worklist l SET available = true, claimed_by = NULL, lease_until = NULL, num_lost = l.num_lost + lost.crashed::integer
    FROM (
        SELECT i.run_id, i.consumer, i.item_kind, i.item_id, w.crashed FROM rft.worklist i JOIN rft.worker w ON w.worker_id = i.claimed_by
        WHERE i.run_id = %(run_id)s AND i.consumer = 'pipeline' AND NOT i.available AND (w.stopped_at IS NOT NULL OR i.lease_until < rft.clock())
        FOR UPDATE OF i SKIP LOCKED) lost
    WHERE (l.run_id, l.consumer, l.item_kind, l.item_id) = (lost.run_id, lost.consumer, lost.item_kind, lost.item_id)
    RETURNING 1)
SELECT (SELECT count(*) FROM groups) + (SELECT count(*) FROM evaluations) + (SELECT count(*) FROM items) AS released;
