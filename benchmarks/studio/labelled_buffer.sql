-- name: versions
-- The version that the runs train on, and another one that decided on the same rows.
INSERT INTO rft.pipeline (pipeline_version, digest, stages, label_kinds)
VALUES ('history', '', '[{"two_in_five": {}}]', '{score}'), ('other', 'other', '[{"one_in_five": {}}]', '{}') ON CONFLICT DO NOTHING;

-- name: other_verdicts
-- The verdicts of the other version: one group in five is dropped.
INSERT INTO rft.verdict (experience_id, group_id, pipeline_version, kept, stage, reason, reward)
SELECT experience_id, group_id, 'other', group_id % 5 <> 4, CASE WHEN group_id % 5 = 4 THEN 'one_in_five' END, CASE WHEN group_id % 5 = 4 THEN 'its number' END, reward / 2
FROM rft.experience;

-- name: stage_runs
-- One row of a stage for each 64 groups of a run.
INSERT INTO rft.operator_run (run_id, pipeline_version, stage_index, stage, rows_in, rows_kept, rows_dropped, rows_created, seconds)
SELECT g.run_id, v.version, 0, v.stage, 512, 307, 205, 0, 0.1
FROM rft.rollout_group g CROSS JOIN (VALUES ('history', 'two_in_five'), ('other', 'one_in_five')) v (version, stage) WHERE g.group_id % 64 = 0;

-- name: steps
-- Four groups in each step of the explorer.
UPDATE rft.rollout_group SET explore_step = (group_id - first) / 4
FROM (SELECT run_id AS of_run, min(group_id) AS first FROM rft.rollout_group GROUP BY 1) r WHERE of_run = run_id;

-- name: task_vectors
-- A vector for each task.
INSERT INTO rft.task_embedding (task_id, model, text_digest, embedding)
SELECT t.task_id, 'bench', t.task_id, ARRAY(SELECT (sin(t.task_id * i))::real FROM generate_series(1, 64) i) FROM rft.task t;

-- name: task_statistics
-- Outcomes of each task in each run, and their fold.
INSERT INTO rft.task_stat (run_id, task_id, attempts, alpha, beta, mean_reward)
SELECT g.run_id, g.task_id, count(*), 1 + count(*), 1 + count(*), 0.5 FROM rft.rollout_group g GROUP BY 1, 2 ON CONFLICT DO NOTHING;

-- name: annotations
-- Annotations by the given number of accounts about one in `every` experiences. Ids are given, as copies of annotations have them.
INSERT INTO rft.annotation (annotation_id, kind, kind_version, type, target_id, group_id, value, author, session_user_name, reason, seconds, label_batch_id, made_at)
SELECT nextval('rft.label_label_id_seq'), %(kind)s, 1, %(type)s::rft.label_type, e.experience_id, e.group_id,
       CASE %(type)s WHEN 'number' THEN to_jsonb((e.experience_id * p * 7 %% 11) / 10.0) WHEN 'bool' THEN to_jsonb((e.experience_id + p) %% 3 > 0)
                     WHEN 'text' THEN to_jsonb(repeat('The sum is wrong. ', 5)) ELSE jsonb_build_object('response', 'The sum is 3.') END,
       'person ' || p, 'person_' || p, 'seen', 2 + e.experience_id %% 7, %(batch)s, clock_timestamp()
FROM generate_series(1, %(people)s) p CROSS JOIN rft.experience e WHERE e.experience_id %% %(every)s = 0 ORDER BY p, e.experience_id;

-- name: rankings
-- A ranking by two people of one in `every` groups.
INSERT INTO rft.annotation (annotation_id, kind, kind_version, type, target_id, group_id, value, author, session_user_name, shown, label_batch_id, made_at)
SELECT nextval('rft.label_label_id_seq'), 'best', 1, 'ranking', g.group_id, g.group_id,
       jsonb_build_object('order', (SELECT jsonb_agg(jsonb_build_array(e.experience_id) ORDER BY e.experience_id * p %% 5, e.experience_id) FROM rft.experience e WHERE e.group_id = g.group_id)),
       'person ' || p, 'person_' || p,
       jsonb_build_object('order', (SELECT jsonb_agg(e.experience_id ORDER BY e.experience_id) FROM rft.experience e WHERE e.group_id = g.group_id)), %(batch)s, clock_timestamp()
FROM generate_series(1, 2) p CROSS JOIN rft.rollout_group g WHERE g.group_id %% %(every)s = 0 ORDER BY p, g.group_id;

-- name: analyze
-- Statistics, as autovacuum makes them.
ANALYZE;
