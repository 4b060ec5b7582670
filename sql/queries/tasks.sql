-- name: find_taskset (read)
-- The taskset of a name.
SELECT * FROM rft.taskset WHERE taskset = %(taskset)s;

-- name: save_taskset
-- Store a taskset, or how it was last loaded.
INSERT INTO rft.taskset AS s (taskset, source, args, num_tasks) VALUES (%(taskset)s, %(source)s, %(args)s, %(num_tasks)s)
ON CONFLICT (taskset) DO UPDATE SET args = excluded.args, num_tasks = excluded.num_tasks, loaded_at = clock_timestamp();

-- name: stage_tasks
-- The table into which tasks are loaded.
CREATE TEMPORARY TABLE staged_task (position bigint, task_key text, payload jsonb, features jsonb) ON COMMIT DROP;

-- name: analyze_staged_tasks
-- Let the planner know how many tasks were loaded.
ANALYZE staged_task;

-- name: changed_tasks
-- Number of stored tasks whose content in the source has changed, and the first of them. Changes by a task pipeline or by hand are not
-- changes of the source. Purged tasks are not compared.
SELECT count(*) AS n, (array_agg(t.task_key ORDER BY t.task_id))[1] AS task_key,
       (array_agg(jsonb_build_object('payload', coalesce(t.source_payload, t.payload), 'features', coalesce(t.source_features, t.features))
                  ORDER BY t.task_id))[1] AS stored,
       (array_agg(jsonb_build_object('payload', s.payload, 'features', s.features) ORDER BY t.task_id))[1] AS now
FROM staged_task s JOIN rft.task t ON t.taskset = %(taskset)s AND t.task_key = s.task_key
WHERE t.payload <> '{"purged": true}'
  AND (coalesce(t.source_payload, t.payload), coalesce(t.source_features, t.features)) IS DISTINCT FROM (s.payload, s.features);

-- name: taskset_is_used (read)
-- Whether rollouts or evaluations refer to its tasks.
SELECT EXISTS (SELECT FROM rft.rollout_group g JOIN rft.task t USING (task_id) WHERE t.taskset = %(taskset)s)
    OR EXISTS (SELECT FROM rft.evaluation WHERE taskset = %(taskset)s) AS used;

-- name: replace_tasks
-- Replace changed tasks. A task with new content has no verdict; the old verdict stays stored, and the status stays until the next one.
-- Features set by hand stay. By the change of source_features a trigger knows that the source has changed.
UPDATE rft.task t
SET payload = s.payload, features = s.features || t.manual_features, source_payload = NULL, source_features = s.features,
    task_verdict_id = NULL
FROM staged_task s
WHERE t.taskset = %(taskset)s AND t.task_key = s.task_key AND t.payload <> '{"purged": true}'
  AND (coalesce(t.source_payload, t.payload), coalesce(t.source_features, t.features)) IS DISTINCT FROM (s.payload, s.features);

-- name: count_room
-- Number of stored rows of the source, including those that have left it, and of staged rows that are not stored.
SELECT (SELECT count(*) FROM rft.task
        WHERE taskset = %(taskset)s AND NOT coalesce(source_features, features) ?| ARRAY['made_by', 'parent_experience_id']) AS num_stored,
       (SELECT count(*) FROM staged_task s
        WHERE NOT EXISTS (SELECT FROM rft.task t WHERE t.taskset = %(taskset)s AND t.task_key = s.task_key)) AS num_new;

-- name: merge_tasks
-- Insert at most `room` new tasks. Known ones are left out beforehand, because a conflict would cost an id and a dead row.
INSERT INTO rft.task (taskset, task_key, payload, features, status)
SELECT %(taskset)s, task_key, payload, features, %(status)s::rft.task_status FROM staged_task s
WHERE NOT EXISTS (SELECT FROM rft.task t WHERE t.taskset = %(taskset)s AND t.task_key = s.task_key)
ORDER BY position LIMIT %(room)s::bigint
ON CONFLICT (taskset, task_key) DO NOTHING;

-- name: activate_pending_tasks
-- Activate tasks that no pipeline decides on any more.
UPDATE rft.task SET status = 'active' WHERE taskset = %(taskset)s AND status = 'pending';

-- name: mark_left_tasks
-- Record which stored tasks have left the source, if all of it was read (`whole`), and which are back. Tasks created by stages are not
-- part of the source.
UPDATE rft.task t
SET left_source_at = CASE WHEN n.is_there THEN NULL ELSE clock_timestamp() END
FROM (
    SELECT t.task_id, s.task_key IS NOT NULL AS is_there
    FROM rft.task t LEFT JOIN staged_task s USING (task_key)
    WHERE t.taskset = %(taskset)s AND (t.left_source_at IS NULL) = (s.task_key IS NULL) AND (s.task_key IS NOT NULL OR %(whole)s)
      AND NOT coalesce(t.source_features, t.features) ?| ARRAY['made_by', 'parent_experience_id']) n
WHERE t.task_id = n.task_id;

-- name: count_tasks (read)
-- Number of tasks, and of those that have left their source but may still be selected.
SELECT count(*) AS n, count(*) FILTER (WHERE left_source_at IS NOT NULL AND status <> 'excluded') AS num_left
FROM rft.task WHERE taskset = %(taskset)s;

-- name: list_tasksets (read)
-- All tasksets, with the mean scores of their active tasks.
SELECT s.taskset, s.source, s.args, s.num_tasks, n.active, n.excluded, n.pending, n.scores, s.loaded_at
FROM rft.taskset s
CROSS JOIN LATERAL (
    SELECT count(*) FILTER (WHERE t.status = 'active') AS active, count(*) FILTER (WHERE t.status = 'excluded') AS excluded,
           count(*) FILTER (WHERE t.status = 'pending') AS pending,
           jsonb_strip_nulls(jsonb_build_object(
               'difficulty', round(avg(CASE WHEN jsonb_typeof(t.features -> 'difficulty') = 'number' THEN (t.features ->> 'difficulty')::double precision END)
                   FILTER (WHERE t.status = 'active')::numeric, 4),
               'quality', round(avg(CASE WHEN jsonb_typeof(t.features -> 'quality') = 'number' THEN (t.features ->> 'quality')::double precision END)
                   FILTER (WHERE t.status = 'active')::numeric, 4),
               'diversity', round(avg(CASE WHEN jsonb_typeof(t.features -> 'diversity') = 'number' THEN (t.features ->> 'diversity')::double precision END)
                   FILTER (WHERE t.status = 'active')::numeric, 4),
               'usage_frequency', round(avg(CASE WHEN jsonb_typeof(t.features -> 'usage_frequency') = 'number' THEN (t.features ->> 'usage_frequency')::double precision END)
                   FILTER (WHERE t.status = 'active')::numeric, 4),
               'priority', round(avg(CASE WHEN jsonb_typeof(t.features -> 'priority') = 'number' THEN (t.features ->> 'priority')::double precision END)
                   FILTER (WHERE t.status = 'active')::numeric, 4))) AS scores
    FROM rft.task t WHERE t.taskset = s.taskset) n
ORDER BY s.taskset;

-- name: show_tasks (read)
-- Tasks of a set with their verdicts, ordered by a numeric feature or by id.
SELECT task_id, task_key, status, status_pinned, features, source_features, manual_features, left_source_at, prompt, answer, kept, stage, reason, pipeline_version, decided_at
FROM rft.v_task
WHERE taskset = %(taskset)s AND (%(status)s::text IS NULL OR status::text = %(status)s)
ORDER BY CASE WHEN jsonb_typeof(features -> %(feature)s::text) = 'number'
              THEN (features ->> %(feature)s::text)::double precision END DESC NULLS LAST, task_id
LIMIT %(limit)s;

-- name: task_feature_names (read)
-- Names of the numeric features of a set's tasks.
SELECT DISTINCT f.key FROM (SELECT features FROM rft.task WHERE taskset = %(taskset)s ORDER BY task_id LIMIT 1000) t
CROSS JOIN LATERAL jsonb_each(t.features) f WHERE jsonb_typeof(f.value) = 'number' ORDER BY 1;

-- name: features_by_hand (read)
-- Tasks that have this feature set by hand, and whether it is a number.
SELECT coalesce(jsonb_object_agg(task_key, jsonb_typeof(manual_features -> %(key)s::text) = 'number'), '{}') AS are_numbers
FROM rft.task WHERE taskset = %(taskset)s AND manual_features ? %(key)s::text;

-- name: undecided_tasks (read)
-- Tasks whose current verdict is not of this pipeline version, or has a reason like `failure`; all tasks with `again`. Purged tasks are left
-- out.
SELECT coalesce(array_agg(t.task_id ORDER BY t.task_id), '{}') AS task_ids
FROM rft.task t LEFT JOIN rft.task_verdict v ON v.task_verdict_id = t.task_verdict_id
WHERE t.taskset = %(taskset)s AND t.payload ? 'prompt'
  AND (%(again)s OR v.pipeline_version IS DISTINCT FROM %(pipeline_version)s OR v.reason LIKE %(failure)s);

-- name: decidable_tasks (read)
-- Tasks of a set that are not purged, without those whose current verdict is of pipeline `version` and has a reason like `blocked`.
SELECT coalesce(array_agg(t.task_id ORDER BY t.task_id), '{}') AS task_ids
FROM rft.task t LEFT JOIN rft.task_verdict v ON v.task_verdict_id = t.task_verdict_id
WHERE t.taskset = %(taskset)s AND t.payload ? 'prompt'
  AND (v.pipeline_version = %(version)s AND v.reason LIKE %(blocked)s) IS NOT TRUE;

-- name: taskset_texts (read)
-- Prompts and answers of a set, as given by the source. A chat is shown as the contents of its messages.
SELECT t.task_key,
       CASE jsonb_typeof(p.payload -> 'prompt')
           WHEN 'array' THEN (SELECT string_agg(m.value ->> 'content', E'\n' ORDER BY m.ordinality)
                              FROM jsonb_array_elements(p.payload -> 'prompt') WITH ORDINALITY m)
           ELSE p.payload ->> 'prompt' END AS prompt,
       p.payload ->> 'answer' AS answer
FROM rft.task t
CROSS JOIN LATERAL (SELECT coalesce(t.source_payload, t.payload) AS payload) p
WHERE t.taskset = %(taskset)s AND p.payload ? 'prompt'
ORDER BY t.task_id;

-- name: task_batch (read)
-- The columns that stages see of a task: as given by the source and set by hand, without changes by an earlier pipeline. A chat is shown as
-- the contents of its messages.
SELECT t.task_id, t.taskset, t.task_key,
       CASE WHEN 'prompt' = ANY (%(columns)s) THEN
           CASE jsonb_typeof(p.payload -> 'prompt')
               WHEN 'string' THEN p.payload ->> 'prompt'
               WHEN 'array' THEN (SELECT string_agg(m.value ->> 'content', E'\n' ORDER BY m.ordinality)
                                  FROM jsonb_array_elements(p.payload -> 'prompt') WITH ORDINALITY m)
               ELSE (p.payload -> 'prompt')::text END END AS prompt,
       jsonb_typeof(p.payload -> 'prompt') = 'string' AS is_text,
       p.payload ->> 'answer' AS answer,
       CASE WHEN 'metadata' = ANY (%(columns)s) THEN (p.payload -> 'metadata')::text END AS metadata,
       CASE WHEN 'features' = ANY (%(columns)s) THEN (coalesce(t.source_features, t.features) || t.manual_features)::text END AS features
FROM unnest(%(task_ids)s::bigint[]) WITH ORDINALITY AS i (task_id, place)
JOIN rft.task t USING (task_id)
CROSS JOIN LATERAL (SELECT coalesce(t.source_payload, t.payload) AS payload) p
WHERE p.payload ? 'prompt'
ORDER BY i.place;

-- name: task_outcomes (read)
-- Outcomes of a set's tasks over all runs: number of observed groups, and mean reward in [0, 1].
SELECT s.task_id, sum(s.attempts)::bigint AS attempts, sum(s.attempts * s.mean_reward) / nullif(sum(s.attempts), 0) AS reward
FROM rft.task_stat s JOIN rft.task t USING (task_id)
WHERE t.taskset = %(taskset)s AND s.mean_reward IS NOT NULL AND s.attempts > 0
GROUP BY s.task_id ORDER BY s.task_id;

-- name: task_groups (read)
-- Number of sampled rollout groups per task, over all runs.
SELECT g.task_id, count(*) AS num_groups
FROM rft.rollout_group g JOIN rft.task t USING (task_id)
WHERE t.taskset = %(taskset)s AND g.sealed_at IS NOT NULL
GROUP BY g.task_id ORDER BY g.task_id;

-- name: task_draws (read)
-- How often groups of a task were drawn for a training step, over all runs. Steps that a run has gone back behind count, because the
-- task was used.
SELECT g.task_id, count(DISTINCT (d.attempt_id, d.trainer_step, e.group_id)) AS num_draws
FROM rft.draw d JOIN rft.experience e USING (experience_id) JOIN rft.rollout_group g ON g.group_id = e.group_id
JOIN rft.task t ON t.task_id = g.task_id
WHERE t.taskset = %(taskset)s
GROUP BY g.task_id ORDER BY g.task_id;

-- name: makers_of_tasks (read)
-- Tasks that stages created from other tasks, with the names of those stages.
SELECT task_id, ARRAY(SELECT jsonb_array_elements_text(coalesce(source_features, features) -> 'made_by')) AS made_by
FROM rft.task WHERE task_id = ANY (%(task_ids)s) AND jsonb_typeof(coalesce(source_features, features) -> 'made_by') = 'array';

-- name: make_tasks_of_tasks
-- Create tasks, each once by its key. A task for the set that is being decided on waits for its verdict; in another set it may be selected at once.
WITH given AS (
    SELECT DISTINCT ON (taskset, task_key) * FROM unnest(
        %(tasksets)s::text[], %(task_keys)s::text[], %(payloads)s::jsonb[], %(features)s::jsonb[], %(parents)s::bigint[], %(stages)s::text[])
        WITH ORDINALITY AS g (taskset, task_key, payload, features, parent_id, stage, place)
    ORDER BY taskset, task_key, place),
made AS (
    INSERT INTO rft.task (taskset, task_key, payload, features, status)
    SELECT g.taskset, g.task_key, g.payload,
           g.features || jsonb_build_object('parent_task_id', g.parent_id, 'made_by',
               coalesce(coalesce(p.source_features, p.features) -> 'made_by', '[]') || to_jsonb(g.stage)),
           CASE WHEN g.taskset = %(taskset)s THEN 'pending' ELSE 'active' END::rft.task_status
    FROM given g LEFT JOIN rft.task p ON p.task_id = g.parent_id
    WHERE NOT EXISTS (SELECT FROM rft.task t WHERE t.taskset = g.taskset AND t.task_key = g.task_key)
    ORDER BY g.place
    ON CONFLICT (taskset, task_key) DO NOTHING RETURNING taskset)
UPDATE rft.taskset s SET num_tasks = s.num_tasks + (SELECT count(*) FROM made m WHERE m.taskset = s.taskset)
WHERE s.taskset IN (SELECT taskset FROM made);

-- name: stored_task_scores (read)
-- Scores that stages have already found for tasks.
SELECT r.row_id, s.score_key, s.input_digest, s.scores
FROM unnest(%(row_ids)s::bigint[]) AS r (row_id)
CROSS JOIN unnest(%(score_keys)s::text[]) AS k (score_key)
CROSS JOIN LATERAL (
    SELECT * FROM rft.task_score
    WHERE task_id = r.row_id AND score_key = k.score_key AND error IS NULL AND input_digest IS NOT NULL OFFSET 0) s;

-- name: store_task_scores
-- Store the scores that stages found for tasks.
INSERT INTO rft.task_score AS s (task_id, score_key, stage, scores, error, input_digest)
SELECT * FROM unnest(%(row_ids)s::bigint[], %(score_keys)s::text[], %(stages)s::text[], %(scores)s::jsonb[], %(errors)s::text[],
                     %(input_digests)s::bigint[]) AS n (task_id, score_key, stage, scores, error, input_digest)
ORDER BY task_id, score_key
ON CONFLICT (task_id, score_key) DO UPDATE
SET scores = excluded.scores, error = excluded.error, input_digest = excluded.input_digest, scored_at = clock_timestamp()
WHERE (s.scores, s.error, s.input_digest) IS DISTINCT FROM (excluded.scores, excluded.error, excluded.input_digest);

-- name: lock_tasks
-- Those of these tasks that are not purged, locked: a purge of them waits until the transaction has ended.
SELECT task_id FROM rft.task WHERE task_id = ANY (%(task_ids)s) AND payload <> '{"purged": true}' ORDER BY task_id FOR KEY SHARE;

-- name: stage_task_verdicts
-- The table into which verdicts on tasks are written.
CREATE TEMPORARY TABLE staged_verdict (
    task_id bigint, kept boolean, stage text, reason text, features jsonb, prompt text, answer text, answer_changed boolean)
ON COMMIT DROP;

-- name: tried_tasks_that_change
-- Number of tasks that were sampled with one text and would get another.
SELECT count(*) AS n, min(task_id) AS task_id FROM (
    SELECT t.task_id FROM staged_verdict s JOIN rft.task t USING (task_id)
    WHERE t.payload IS DISTINCT FROM rft.changed_payload(coalesce(t.source_payload, t.payload), s.prompt, s.answer, s.answer_changed)) c
WHERE EXISTS (SELECT FROM rft.rollout_group g WHERE g.task_id = c.task_id);

-- name: save_task_verdicts
-- Store new verdicts beside the old ones, and update the tasks. A repetition of the current verdict is not stored. A status and features
-- set by hand stay.
WITH news AS (
    SELECT s.* FROM staged_verdict s JOIN rft.task t USING (task_id)
    LEFT JOIN rft.task_verdict v ON v.task_verdict_id = t.task_verdict_id
    WHERE t.payload ? 'prompt'
      AND (v.pipeline_version, v.kept, v.stage, v.reason, v.features, v.prompt, v.answer, v.answer_changed)
          IS DISTINCT FROM (%(pipeline_version)s::text, s.kept, s.stage, s.reason, s.features, s.prompt, s.answer, s.answer_changed)),
made AS (
    INSERT INTO rft.task_verdict (task_id, pipeline_version, kept, stage, reason, features, prompt, answer, answer_changed)
    SELECT task_id, %(pipeline_version)s, kept, stage, reason, features, prompt, answer, answer_changed FROM news ORDER BY task_id
    RETURNING *)
UPDATE rft.task t
SET task_verdict_id = m.task_verdict_id,
    status = CASE WHEN t.status_pinned THEN t.status WHEN m.kept THEN 'active' ELSE 'excluded' END::rft.task_status,
    source_features = CASE WHEN m.features || t.manual_features = '{}' THEN NULL ELSE coalesce(t.source_features, t.features) END,
    features = coalesce(t.source_features, t.features) || m.features || t.manual_features,
    source_payload = CASE WHEN m.prompt IS NULL AND NOT m.answer_changed THEN NULL ELSE coalesce(t.source_payload, t.payload) END,
    payload = rft.changed_payload(coalesce(t.source_payload, t.payload), m.prompt, m.answer, m.answer_changed)
FROM made m WHERE t.task_id = m.task_id;

-- name: taskset_verdicts (read)
-- Number of a set's tasks by status, and the stages that excluded them.
SELECT count(*) AS num_tasks, count(*) FILTER (WHERE t.status = 'active') AS active,
       count(*) FILTER (WHERE t.status = 'excluded') AS excluded,
       (SELECT jsonb_object_agg(d.stage, d.n) FROM (
            SELECT coalesce(v.stage, 'by hand') AS stage, count(*) AS n
            FROM rft.task x LEFT JOIN rft.task_verdict v ON v.task_verdict_id = x.task_verdict_id AND NOT v.kept
            WHERE x.taskset = %(taskset)s AND x.status = 'excluded' GROUP BY 1) d) AS dropped_by
FROM rft.task t WHERE t.taskset = %(taskset)s;

-- name: tasks_without_answer (read)
-- Number of a set's selectable tasks, number of those with a missing or blank answer, and the keys of the first of these.
WITH active AS (
    SELECT t.task_id, t.task_key, coalesce(t.payload ->> 'answer', '') !~ '\S' AS lacks
    FROM rft.task t WHERE t.taskset = %(taskset)s AND t.status = 'active')
SELECT count(*) AS num_tasks, count(*) FILTER (WHERE lacks) AS num_lacking,
       ARRAY(SELECT task_key FROM active WHERE lacks ORDER BY task_id LIMIT %(num_keys)s) AS task_keys
FROM active;

-- name: known_embeddings (read)
-- Stored vectors of the tasks' current texts, in the binary form of an array: the text form takes ten times as long.
SELECT i.place - 1 AS place, array_send(e.embedding::real[]) AS embedding
FROM unnest(%(task_ids)s::bigint[], %(digests)s::bigint[]) WITH ORDINALITY AS i (task_id, text_digest, place)
JOIN rft.task_embedding e ON e.task_id = i.task_id AND e.model = %(model)s AND e.text_digest = i.text_digest;

-- name: use_pgvector
-- Choose the type in which vectors are stored from now on.
SELECT rft.use_pgvector() AS kind;

-- name: stage_embeddings
-- The table into which vectors of tasks are written.
CREATE TEMPORARY TABLE staged_embedding (task_id bigint, text_digest bigint, embedding real[]) ON COMMIT DROP;

-- name: save_embeddings
-- Store the vectors of tasks, computed by one model.
INSERT INTO rft.task_embedding AS e (task_id, model, text_digest, embedding)
SELECT task_id, %(model)s, text_digest, embedding FROM staged_embedding
ON CONFLICT (task_id, model) DO UPDATE SET text_digest = excluded.text_digest, embedding = excluded.embedding, embedded_at = clock_timestamp();

-- name: task_stats (read)
-- Statistics of a run's tasks, the last selected tasks first.
SELECT taskset, task_key, task_id, status::text AS status, pass_rate, alpha, beta, attempts, mean_reward, last_selected_at
FROM rft.v_task_stat
WHERE run_id = %(run_id)s AND (%(taskset)s::text IS NULL OR taskset = %(taskset)s)
ORDER BY last_selected_at DESC NULLS LAST, task_id LIMIT %(limit)s;

-- name: check_task_stat
-- Tasks of a run whose statistics differ from the fold of their outcomes.
SELECT t.taskset, t.task_key, c.* FROM rft.check_task_stat(%(run_id)s) c JOIN rft.task t USING (task_id) ORDER BY task_id;
