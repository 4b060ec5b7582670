-- name: find_taskset
SELECT * FROM rft.taskset WHERE taskset = %(taskset)s;

-- name: save_taskset
INSERT INTO rft.taskset AS s (taskset, source, args, num_tasks) VALUES (%(taskset)s, %(source)s, %(args)s, %(num_tasks)s)
ON CONFLICT (taskset) DO UPDATE SET args = excluded.args, num_tasks = excluded.num_tasks, loaded_at = clock_timestamp();

-- name: stage_tasks
CREATE TEMPORARY TABLE staged_task (position bigint, task_key text, payload jsonb, features jsonb) ON COMMIT DROP;

-- name: changed_tasks
-- How many stored tasks have another content in the source by now, and the first of them.
SELECT count(*) AS n, (array_agg(t.task_key ORDER BY t.task_id))[1] AS task_key,
       (array_agg(jsonb_build_object('payload', t.payload, 'features', t.features) ORDER BY t.task_id))[1] AS stored,
       (array_agg(jsonb_build_object('payload', s.payload, 'features', s.features) ORDER BY t.task_id))[1] AS now
FROM staged_task s JOIN rft.task t ON t.taskset = %(taskset)s AND t.task_key = s.task_key
WHERE (t.payload, t.features) IS DISTINCT FROM (s.payload, s.features);

-- name: taskset_is_used
-- Whether rollouts or answers speak of its tasks.
SELECT EXISTS (SELECT FROM rft.rollout_group g JOIN rft.task t USING (task_id) WHERE t.taskset = %(taskset)s)
    OR EXISTS (SELECT FROM rft.evaluation WHERE taskset = %(taskset)s) AS used;

-- name: replace_tasks
UPDATE rft.task t SET payload = s.payload, features = s.features FROM staged_task s
WHERE t.taskset = %(taskset)s AND t.task_key = s.task_key
  AND (t.payload, t.features) IS DISTINCT FROM (s.payload, s.features);

-- name: merge_tasks
INSERT INTO rft.task (taskset, task_key, payload, features)
SELECT %(taskset)s, task_key, payload, features FROM staged_task ORDER BY position
ON CONFLICT (taskset, task_key) DO NOTHING;

-- name: count_tasks
SELECT count(*) AS n FROM rft.task WHERE taskset = %(taskset)s;

-- name: list_tasksets
SELECT taskset, source, args, num_tasks, loaded_at FROM rft.taskset ORDER BY taskset;

-- name: task_stats
-- What a run knows of its tasks, the newest choices first.
SELECT taskset, task_key, task_id, status::text AS status, pass_rate, alpha, beta, attempts, mean_reward, last_selected_at
FROM rft.v_task_stat
WHERE run_id = %(run_id)s AND (%(taskset)s::text IS NULL OR taskset = %(taskset)s)
ORDER BY last_selected_at DESC NULLS LAST, task_id LIMIT %(limit)s;

-- name: check_task_stat
SELECT t.taskset, t.task_key, c.* FROM rft.check_task_stat(%(run_id)s) c JOIN rft.task t USING (task_id) ORDER BY task_id;
