-- name: studio_run_page (read)
-- A page of runs, newest first, from before a run on.
SELECT r.run_id, r.name, r.mode::text AS mode, r.status::text AS status, r.outcome, r.planned_steps, r.created_at,
       r.config #>> '{model,path}' AS model, r.config #>> '{algorithm,name}' AS algorithm, p.name AS parent, r.config ? 'import' AS is_imported,
       (SELECT max(s.trainer_step) FROM rft.attempt_history h
        CROSS JOIN LATERAL (SELECT max(trainer_step) AS trainer_step FROM rft.train_step
                            WHERE attempt_id = h.attempt_id AND (h.last_step IS NULL OR trainer_step <= h.last_step)) s
        WHERE h.history_id = r.current_attempt_id) AS step,
       EXISTS (SELECT FROM rft.worker w WHERE w.run_id = r.run_id AND w.stopped_at IS NULL AND w.role <> 'replay'
               AND w.heartbeat_at > rft.clock() - interval '15 s') AS is_alive,
       extract(epoch FROM coalesce(r.finished_at, rft.clock()) - r.created_at)::double precision AS seconds,
       e.taskset, e.mean_reward
FROM rft.run r
LEFT JOIN rft.run p ON p.run_id = r.parent_run_id
LEFT JOIN LATERAL (
    SELECT taskset, mean_reward FROM rft.evaluation WHERE run_id = r.run_id AND status = 'done'
    ORDER BY policy_version_id DESC, evaluation_id DESC LIMIT 1) e ON true
WHERE (%(before)s::bigint IS NULL OR r.run_id < %(before)s) AND (%(name)s::text IS NULL OR strpos(lower(r.name), lower(%(name)s)) > 0)
ORDER BY r.run_id DESC LIMIT %(limit)s;

-- name: studio_runs_by_id (read)
-- Runs with their configurations.
SELECT run_id, name, config FROM rft.run WHERE run_id = ANY (%(run_ids)s) ORDER BY array_position(%(run_ids)s::bigint[], run_id);

-- name: studio_steps (read)
-- The steps of a run's current history: what a curve shows.
SELECT trainer_step, num_tokens / nullif(wait_seconds + train_seconds + publish_seconds, 0) AS tokens_per_s,
       (metrics ->> %(metric)s)::double precision AS metric
FROM rft.v_train_step WHERE run_id = %(run_id)s ORDER BY trainer_step;

-- name: studio_staleness (read)
-- Mean staleness of the experiences that each step of a run's current history trained on.
SELECT d.trainer_step, avg(d.staleness)::double precision AS mean
FROM rft.run r
JOIN rft.attempt_history h ON h.history_id = r.current_attempt_id
JOIN rft.draw d ON d.attempt_id = h.attempt_id AND (h.last_step IS NULL OR d.trainer_step <= h.last_step)
WHERE r.run_id = %(run_id)s GROUP BY d.trainer_step ORDER BY d.trainer_step;

-- name: studio_step (read)
-- A step of a run's current history; no row before it was trained.
SELECT trainer_step, outcome::text AS outcome, reason, num_groups, num_experiences, num_tokens, wait_seconds, train_seconds, publish_seconds, metrics,
       finished_at
FROM rft.v_train_step WHERE run_id = %(run_id)s AND trainer_step = %(step)s;

-- name: studio_sampled_groups (read)
-- A page of the groups that were sampled for a step of the explorer, from after an ordinal on, with their rollouts.
SELECT g.group_id, g.ordinal, t.taskset, t.task_key, g.status::text AS status, g.trainable, g.closed_reason, g.is_refill, o.rollouts,
       (SELECT left(p.prompt, 300) FROM rft.group_prompt p WHERE p.group_id = g.group_id LIMIT 1) AS prompt
FROM rft.rollout_group g
JOIN rft.task t USING (task_id)
LEFT JOIN LATERAL (
    SELECT jsonb_agg(jsonb_build_object('rollout_id', rollout_id, 'outcome', outcome, 'reward', reward) ORDER BY rollout_index) AS rollouts
    FROM rft.rollout WHERE group_id = g.group_id) o ON true
WHERE g.run_id = %(run_id)s AND g.explore_step = %(step)s - 1 AND g.ordinal > %(after)s
ORDER BY g.ordinal LIMIT %(limit)s;

-- name: studio_trained_groups (read)
-- A page of the groups that a step of a run's current history trained on, from after a group on, with their rollouts and staleness.
SELECT g.group_id, g.group_id AS ordinal, t.taskset, t.task_key, g.status::text AS status, g.trainable, g.closed_reason, g.is_refill, o.rollouts, d.staleness,
       (SELECT left(p.prompt, 300) FROM rft.group_prompt p WHERE p.group_id = g.group_id LIMIT 1) AS prompt
FROM (
    SELECT e.group_id, max(d.staleness) AS staleness
    FROM rft.run r
    JOIN rft.attempt_history h ON h.history_id = r.current_attempt_id AND (h.last_step IS NULL OR h.last_step >= %(step)s)
    JOIN rft.draw d ON d.attempt_id = h.attempt_id AND d.trainer_step = %(step)s
    JOIN rft.experience e USING (experience_id)
    WHERE r.run_id = %(run_id)s AND e.group_id > %(after)s GROUP BY e.group_id ORDER BY e.group_id LIMIT %(limit)s) d
JOIN rft.rollout_group g USING (group_id)
JOIN rft.task t USING (task_id)
LEFT JOIN LATERAL (
    SELECT jsonb_agg(jsonb_build_object('rollout_id', rollout_id, 'outcome', outcome, 'reward', reward) ORDER BY rollout_index) AS rollouts
    FROM rft.rollout WHERE group_id = g.group_id) o ON true
ORDER BY g.group_id;

-- name: studio_newest_steps (read)
-- The newest steps of a run's current history.
SELECT trainer_step, outcome::text AS outcome, reason, num_experiences, num_tokens, wait_seconds, train_seconds, publish_seconds,
       (metrics ->> 'loss')::double precision AS loss
FROM rft.v_train_step WHERE run_id = %(run_id)s ORDER BY trainer_step DESC LIMIT %(limit)s;

-- name: studio_runs_with_checkpoints (read)
-- The newest runs with a checkpoint, to choose one.
SELECT r.run_id, r.name FROM rft.run r
WHERE EXISTS (SELECT FROM rft.attempt_history h JOIN rft.checkpoint c ON c.attempt_id = h.attempt_id WHERE h.history_id = r.current_attempt_id)
ORDER BY r.run_id DESC LIMIT 50;

-- name: studio_checkpoints (read)
-- A page of the checkpoints of a run's current history, newest first, from before a step on, each with the models of other runs that began with it.
SELECT c.checkpoint_id, c.trainer_step, c.uri, c.num_bytes, c.committed_at, c.deleted_at, a.run_id AS trained_by, r.name AS trained_by_name,
       ARRAY(SELECT u.name FROM rft.run_model m JOIN rft.run u USING (run_id) WHERE m.checkpoint_id = c.checkpoint_id ORDER BY u.run_id LIMIT 10) AS used_by
FROM rft.run of
JOIN rft.attempt_history h ON h.history_id = of.current_attempt_id
JOIN rft.checkpoint c ON c.attempt_id = h.attempt_id AND (h.last_step IS NULL OR c.trainer_step <= h.last_step)
JOIN rft.run_attempt a ON a.attempt_id = c.attempt_id
JOIN rft.run r ON r.run_id = a.run_id
WHERE of.run_id = %(run_id)s AND (%(before)s::integer IS NULL OR c.trainer_step < %(before)s)
ORDER BY c.trainer_step DESC, c.checkpoint_id DESC LIMIT %(limit)s;

-- name: studio_corrected (read)
-- Experiences that a run's current history trained on and whose rewards people have changed since, by the first step that used them, oldest first: first
-- the labels, which are few, then the draws of their experiences.
SELECT * FROM (
    SELECT DISTINCT ON (d.experience_id) d.experience_id, d.trainer_step, d.reward_used, e.reward, l.author, l.labelled_at, l.reason
    FROM rft.run r
    JOIN rft.attempt_history h ON h.history_id = r.current_attempt_id
    JOIN (SELECT DISTINCT experience_id FROM rft.label) k ON true
    JOIN rft.draw d ON d.experience_id = k.experience_id AND d.attempt_id = h.attempt_id AND (h.last_step IS NULL OR d.trainer_step <= h.last_step)
    JOIN rft.experience e ON e.experience_id = d.experience_id
    JOIN rft.rollout_group g ON g.group_id = e.group_id
    LEFT JOIN rft.verdict v ON v.experience_id = e.experience_id AND v.newest_of = g.decided_by
    CROSS JOIN LATERAL (SELECT author, labelled_at, reason FROM rft.label WHERE experience_id = e.experience_id ORDER BY label_id DESC LIMIT 1) l
    WHERE r.run_id = %(run_id)s AND d.trainer_step <= %(up_to)s
      AND d.reward_used IS DISTINCT FROM coalesce(CASE WHEN e.reward_final THEN e.reward END, v.reward, e.reward)
    ORDER BY d.experience_id, d.trainer_step) c
ORDER BY trainer_step, experience_id LIMIT %(limit)s;

-- name: studio_supervised_runs (read)
-- Runs of some configured names, newest first, with the newest process of `rft run` that supervises each; by `at_work` also all runs with one that has not ended.
SELECT r.run_id, r.name, r.status::text AS status, r.outcome, r.planned_steps, r.created_at, r.config ? 'import' AS is_imported,
       EXISTS (SELECT FROM rft.archive x WHERE x.run_id = r.run_id AND x.archived_at IS NOT NULL) AS is_archived,
       w.host, w.pid, w.pid_space, w.pid_started, w.stopped_at IS NULL AS is_supervised, w.heartbeat_at > rft.clock() - interval '15 s' AS beats
FROM rft.run r
LEFT JOIN LATERAL (
    SELECT host, pid, pid_space, pid_started, stopped_at, heartbeat_at FROM rft.worker
    WHERE run_id = r.run_id AND role = 'supervisor' ORDER BY worker_id DESC LIMIT 1) w ON true
WHERE coalesce(r.config #>> '{run,name}', r.name) = ANY (%(names)s) OR (%(at_work)s AND w.pid IS NOT NULL AND w.stopped_at IS NULL)
ORDER BY r.run_id DESC LIMIT %(limit)s;

-- name: studio_supervised_by (read)
-- The runs that a process of `rft run` has supervised.
SELECT DISTINCT run_id FROM rft.worker
WHERE role = 'supervisor' AND host = %(host)s AND pid = %(pid)s AND pid_space = %(pid_space)s AND pid_started = %(pid_started)s;
