-- name: find_taskset
SELECT * FROM rft.taskset WHERE taskset = %(taskset)s;

-- name: save_taskset
INSERT INTO rft.taskset AS s (taskset, source, args, num_tasks) VALUES (%(taskset)s, %(source)s, %(args)s, %(num_tasks)s)
ON CONFLICT (taskset) DO UPDATE SET num_tasks = excluded.num_tasks, loaded_at = clock_timestamp();

-- name: stage_tasks
CREATE TEMPORARY TABLE staged_task (position bigint, task_key text, payload jsonb, features jsonb) ON COMMIT DROP;

-- name: merge_tasks
INSERT INTO rft.task (taskset, task_key, payload, features)
SELECT %(taskset)s, task_key, payload, features FROM staged_task ORDER BY position
ON CONFLICT (taskset, task_key) DO NOTHING;

-- name: count_tasks
SELECT count(*) AS n FROM rft.task WHERE taskset = %(taskset)s;

-- name: list_tasksets
SELECT taskset, source, args, num_tasks, loaded_at FROM rft.taskset ORDER BY taskset;
