-- name: progress_run (read)
-- The status of a run, and the number of steps trained and skipped. resumes_at: the step of the newest checkpoint, with which the next attempt begins.
SELECT r.run_id, r.name, r.current_attempt_id,
       (SELECT coalesce(max(c.trainer_step), 0) FROM rft.v_attempt_history h
        JOIN rft.checkpoint c ON c.attempt_id = h.attempt_id AND (h.last_step IS NULL OR c.trainer_step <= h.last_step)
        WHERE h.history_id = r.current_attempt_id AND c.deleted_at IS NULL) AS resumes_at, r.mode::text AS mode, r.status::text AS status, r.outcome, r.planned_steps,
       r.stop_requested,
       EXISTS (SELECT FROM rft.archive a WHERE a.run_id = r.run_id AND a.status = 'archived') AS archived,
       count(s.trainer_step) FILTER (WHERE s.outcome = 'trained') AS num_trained,
       count(s.trainer_step) FILTER (WHERE s.outcome = 'skipped') AS num_skipped,
       coalesce(max(s.trainer_step), 0) AS step
FROM rft.run r LEFT JOIN rft.v_train_step s USING (run_id)
WHERE r.run_id = %(run_id)s GROUP BY r.run_id;

-- name: progress_untrained (read)
-- How many steps a run's history has, and how many of them trained nothing: they had no experiences, or no gradient that is finite and not 0, or a
-- learning rate of 0.
SELECT count(*) AS num_steps,
       count(*) FILTER (
           WHERE outcome = 'skipped' OR (metrics ->> 'skipped')::float8 = 1 OR (metrics ->> 'learning_rate')::float8 = 0
              OR greatest((metrics ->> 'grad_norm')::float8, (metrics ->> 'critic_grad_norm')::float8) = 0) AS num_untrained
FROM rft.v_train_step WHERE run_id = %(run_id)s;

-- name: progress_steps (read)
-- The newest steps, with their metrics and durations.
SELECT trainer_step, outcome::text AS outcome, reason, num_tokens, wait_seconds, train_seconds, publish_seconds, metrics, finished_at
FROM rft.v_train_step WHERE run_id = %(run_id)s ORDER BY trainer_step DESC LIMIT %(limit)s;

-- name: progress_rewards (read)
-- Sampled rewards from an explorer step on. Earlier steps no longer change, and the caller keeps them. Of the groups with two rewards or more, num_equal have rewards
-- that are all equal.
SELECT explore_step, count(*) AS num_groups, sum(num_rollouts)::bigint AS num_rollouts, sum(total) / nullif(sum(num_scored), 0)::double precision AS mean_reward,
       sum(num_passed) / nullif(sum(num_scored), 0)::double precision AS pass_rate,
       count(*) FILTER (WHERE num_scored > 1) AS num_compared,
       count(*) FILTER (WHERE num_scored > 1 AND lowest = highest) AS num_equal,
       min(lowest) AS lowest, max(highest) AS highest
FROM (
    SELECT g.explore_step, count(*) AS num_rollouts, count(o.reward) AS num_scored, sum(o.reward) AS total, count(*) FILTER (WHERE o.reward >= 1) AS num_passed,
           min(o.reward) AS lowest, max(o.reward) AS highest
    FROM rft.rollout_group g JOIN rft.rollout o USING (group_id)
    WHERE g.run_id = %(run_id)s AND g.explore_step >= %(from_step)s
    GROUP BY g.explore_step, g.group_id) AS by_group
GROUP BY explore_step ORDER BY explore_step;

-- name: progress_failures (read)
-- Failed rollouts by kind of error, from an explorer step on. Earlier steps no longer change, and the caller keeps them. Errors that differ
-- only in numbers and quoted names are of one kind.
SELECT g.explore_step, regexp_replace(coalesce(o.error, 'no error recorded'), $re$[0-9]+|'[^']*'$re$, '#', 'g') AS kind, min(coalesce(o.error, 'no error recorded')) AS error, count(*) AS num
FROM rft.rollout_group g JOIN rft.rollout o USING (group_id)
WHERE g.run_id = %(run_id)s AND g.explore_step >= %(from_step)s AND o.outcome IN ('failed', 'timeout')
GROUP BY 1, 2;

-- name: progress_dropped (read)
-- Of the experiences on which the chain has decided, from an explorer step on, those that each stage dropped. num_decided: of all stages together.
SELECT v.stage, min(rft.general_reason(v.reason)) AS reason, count(*) AS num_dropped, (sum(count(*)) OVER ())::bigint AS num_decided
FROM rft.rollout_group g JOIN rft.verdict v ON v.group_id = g.group_id AND v.newest_of = g.decided_by
WHERE g.run_id = %(run_id)s AND g.explore_step >= %(from_step)s AND g.status = 'ready'
GROUP BY v.stage ORDER BY num_dropped DESC, v.stage;

-- name: progress_queue (read)
-- Number of groups by status; ready ones wait for the trainer, those from a sort key on for a later step than its next.
SELECT count(*) FILTER (WHERE status = 'planned') AS planned, count(*) FILTER (WHERE status = 'claimed') AS claimed,
       count(*) FILTER (WHERE status = 'sealed' AND left_by IS NULL) AS sealed,
       (SELECT count(*) FROM rft.worklist WHERE run_id = %(run_id)s::bigint AND consumer IN ('trainer', 'selection') AND available) AS ready,
       (SELECT count(*) FROM rft.worklist WHERE run_id = %(run_id)s::bigint AND consumer = 'trainer' AND available AND sort_key >= %(step)s::bigint << 32) AS ready_later
FROM rft.rollout_group WHERE run_id = %(run_id)s AND status IN ('planned', 'claimed', 'sealed');

-- name: group_totals (read)
-- Number of groups of a run that were planned, refilled and closed.
SELECT count(*) AS planned, count(*) FILTER (WHERE is_refill) AS refilled, count(*) FILTER (WHERE NOT trainable) AS closed
FROM rft.rollout_group WHERE run_id = %(run_id)s;

-- name: progress_policy (read)
-- The newest weights of a run.
SELECT policy_version_id, trainer_step FROM rft.policy_version WHERE run_id = %(run_id)s ORDER BY policy_version_id DESC LIMIT 1;

-- name: progress_evaluations (read)
-- The newest finished evaluation of each taskset and decoding.
SELECT DISTINCT ON (purpose, taskset, decoding) purpose, taskset, decoding, trainer_step, num_tasks, mean_reward, error
FROM rft.evaluation WHERE run_id = %(run_id)s AND status = 'done'
ORDER BY purpose, taskset, decoding, evaluation_id DESC;

-- name: progress_workers (read)
-- What each process of a run does or waits for.
SELECT v.worker_id, v.role::text AS role, v.host, v.pid, w.pid_space, w.pid_started, v.state, v.waiting_for, v.progress, v.error, v.liveness, v.heartbeat_age_s,
       v.started_at, v.stopped_at
FROM rft.v_waiting v JOIN rft.worker w USING (worker_id)
WHERE w.run_id = %(run_id)s ORDER BY v.worker_id;

-- name: run_seconds (read)
-- Time during which at least one process worked for the run. Overlapping processes count once, and pauses between attempts do not count.
-- The end of a killed process may be recorded days later, so a process counts for at most 15 s after its last heartbeat. Replays, which may follow
-- days later, do not count.
SELECT coalesce(sum(extract(epoch FROM upper(life) - lower(life))), 0)::double precision AS seconds,
       (SELECT count(*) FROM rft.run_attempt WHERE run_id = %(run_id)s) AS num_attempts
FROM unnest((
    SELECT range_agg(tstzrange(started_at, greatest(started_at, least(coalesce(stopped_at, heartbeat_at), heartbeat_at + interval '15 s')), '[]'))
    FROM rft.worker WHERE run_id = %(run_id)s AND role <> 'replay')) AS life;
