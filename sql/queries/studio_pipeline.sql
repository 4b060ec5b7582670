-- name: studio_stages (read)
-- What each stage of a version did with the rows of a run, in the order of the chain.
SELECT stage_index, stage, sum(rows_in)::bigint AS rows_in, sum(rows_kept)::bigint AS rows_kept, sum(rows_dropped)::bigint AS rows_dropped,
       sum(rows_created)::bigint AS rows_created, sum(seconds) AS seconds, count(error) AS num_errors, max(error) AS error
FROM rft.operator_run WHERE run_id = %(run_id)s AND pipeline_version = %(version)s GROUP BY stage_index, stage ORDER BY stage_index;

-- name: studio_versions (read)
-- The versions whose stages ran on rows of a run, the one that it trains on first.
SELECT o.pipeline_version, o.pipeline_version = r.pipeline_version AS is_used, p.stages
FROM rft.run r
CROSS JOIN LATERAL (SELECT DISTINCT pipeline_version FROM rft.operator_run WHERE run_id = r.run_id) o
LEFT JOIN rft.pipeline p ON p.pipeline_version = o.pipeline_version
WHERE r.run_id = %(run_id)s ORDER BY is_used DESC, p.first_used_at DESC NULLS LAST, o.pipeline_version;

-- name: studio_dropped_examples (read)
-- Some of the newest experiences of a run that each stage of a version dropped, among the newest verdicts of the buffer.
SELECT * FROM (
    SELECT v.stage, v.reason, e.experience_id, e.reward, left(e.response, 300) AS response, row_number() OVER (PARTITION BY v.stage ORDER BY v.verdict_id DESC) AS place
    FROM (SELECT * FROM rft.verdict ORDER BY verdict_id DESC LIMIT 20000) v
    JOIN rft.experience e USING (experience_id)
    WHERE e.run_id = %(run_id)s AND NOT v.kept AND v.newest_of = %(version)s) d
WHERE place <= %(limit)s ORDER BY stage, place;

-- name: studio_tasksets (read)
-- Tasksets, to choose one.
SELECT taskset, source, num_tasks, loaded_at FROM rft.taskset ORDER BY taskset LIMIT 200;

-- name: studio_tasks (read)
-- A page of the tasks of a taskset, from after an id on, with their verdict and their statistics in a run.
SELECT t.task_id, t.task_key, t.status::text AS status, t.status_pinned, left(coalesce(t.payload ->> 'prompt', t.payload ->> 'messages'), 300) AS prompt,
       left(t.payload ->> 'answer', 100) AS answer, t.features, v.stage, v.reason, s.attempts, s.mean_reward, s.alpha / (s.alpha + s.beta) AS pass_rate
FROM rft.task t
LEFT JOIN rft.task_verdict v ON v.task_verdict_id = t.task_verdict_id
LEFT JOIN rft.task_stat s ON s.run_id = %(run_id)s::bigint AND s.task_id = t.task_id
WHERE t.taskset = %(taskset)s AND t.task_id > %(after)s AND (%(status)s::text IS NULL OR t.status::text = %(status)s)
ORDER BY t.task_id LIMIT %(limit)s;

-- name: studio_task (read)
-- A task with its verdict.
SELECT t.task_id, t.taskset, t.task_key, t.status::text AS status, t.payload, t.features, v.stage, v.reason, v.decided_at
FROM rft.task t LEFT JOIN rft.task_verdict v ON v.task_verdict_id = t.task_verdict_id WHERE t.task_id = %(task_id)s;

-- name: studio_task_history (read)
-- The outcomes of a task in a run, oldest first.
SELECT o.ordinal, o.kind::text AS kind, o.successes, o.trials, o.observed_at, o.author, g.group_id, g.explore_step
FROM rft.task_observation o LEFT JOIN rft.rollout_group g ON g.run_id = o.run_id AND g.ordinal = o.ordinal
WHERE o.run_id = %(run_id)s AND o.task_id = %(task_id)s ORDER BY o.observation_id LIMIT 500;

-- name: studio_similar_tasks (read)
-- The tasks nearest to a task by their vectors; none if it has no vector.
SELECT t.task_id, t.taskset, t.task_key, s.similarity, left(coalesce(t.payload ->> 'prompt', t.payload ->> 'messages'), 200) AS prompt
FROM rft.similar_tasks(%(task_id)s, 10) s JOIN rft.task t USING (task_id) ORDER BY s.similarity DESC NULLS LAST;

-- name: studio_selectors (read)
-- The state of a run's selectors.
SELECT taskset, selector, state, metrics, updated_at FROM rft.selector_state WHERE run_id = %(run_id)s ORDER BY taskset;

-- name: studio_pair_ids (read)
-- The ids of a page of preference pairs, newest first, from before an id on.
SELECT p.pair_id FROM rft.preference_pair p
WHERE (%(before)s::bigint IS NULL OR p.pair_id < %(before)s)
  AND (%(run_id)s::bigint IS NULL OR (SELECT e.run_id FROM rft.experience e WHERE e.experience_id = p.chosen_id) = %(run_id)s)
ORDER BY p.pair_id DESC LIMIT %(limit)s;

-- name: studio_pairs (read)
-- Preference pairs with their texts, newest first. OFFSET 0: each is found by its key.
SELECT v.* FROM unnest(%(pair_ids)s::bigint[]) AS i (pair_id)
CROSS JOIN LATERAL (
    SELECT pair_id, run, run_id, taskset, task_key, source::text AS source, author, margin, stands, chosen_id, rejected_id, chosen_reward, rejected_reward,
           left(prompt, 300) AS prompt, left(chosen, 400) AS chosen, left(rejected, 400) AS rejected, created_at
    FROM rft.v_pair WHERE pair_id = i.pair_id OFFSET 0) v
ORDER BY v.pair_id DESC;
