-- name: export_groups (read)
-- Groups that have outcomes, in order.
SELECT group_id FROM rft.rollout_group
WHERE status IN ('sealed', 'ready', 'abandoned') AND (%(run_ids)s::bigint[] IS NULL OR run_id = ANY (%(run_ids)s))
  AND (status <> 'abandoned' OR EXISTS (SELECT FROM rft.rollout o WHERE o.group_id = rollout_group.group_id))
ORDER BY run_id, ordinal;

-- name: export_rows
-- All rows of some groups: one per sequence, and one per rollout without a sequence. Imported rows are exported with their original
-- values. The features of a task are those of its source and those set by hand.
SELECT r.run_id, r.name AS run, g.group_id, g.group_size, coalesce(go.explore_step, g.explore_step) AS explore_step,
       t.taskset, t.task_key, t.payload::text AS task_payload, (coalesce(t.source_features, t.features) || t.manual_features)::text AS task_features,
       (to_jsonb(b) - '{group_id, created_at, policy_version_min}'::text[])::text AS baseline,
       o.rollout_index, o.outcome::text AS outcome, o.reward AS rollout_reward, o.seconds, o.error, o.stop_reason::text AS stop_reason, o.tries::text AS tries,
       e.experience_id, e.turn_index, coalesce(eo.source, e.source)::text AS source, e.parent_id, gp.prompt, e.response,
       rft.chat(gp.messages, e.response_messages, e.response)::text AS messages,
       e.reward_sampled, e.reward, e.reward_final,
       (SELECT array_agg(w.reward ORDER BY w.turn) FROM rft.turn_reward w WHERE w.experience_id = e.experience_id) AS turn_rewards,
       e.reward_parts::text AS reward_parts,
       e.metrics::text AS metrics, coalesce(eo.policy_version_min, e.policy_version_min) AS policy_version_min,
       coalesce(eo.policy_version_max, e.policy_version_max) AS policy_version_max,
       coalesce(eo.policy_step, p.trainer_step) AS policy_step, e.num_prompt_tokens, e.fork::text AS fork, e.role, e.finish_reason,
       coalesce(eo.sampled_at, e.created_at) AS created_at,
       (eo.earlier || jsonb_build_array(jsonb_build_object(
           'buffer_id', go.buffer_id, 'run', go.origin_run, 'experience_id', eo.origin_experience_id)))::text AS earlier,
       CASE WHEN ed.annotation_id IS NULL THEN CASE WHEN NOT (ed.origin ->> 'stands')::boolean THEN ed.origin - 'buffer_id' END ELSE (
           SELECT jsonb_build_object('parent_id', a.target_id, 'kind', a.kind, 'source', a.source, 'author', a.author, 'session_user_name', a.session_user_name,
                                     'made_at', coalesce(s.made_at, a.made_at), 'stands', s.annotation_id IS NOT NULL)
           FROM rft.annotation a
           LEFT JOIN rft.annotation s ON (s.annotation_id = a.annotation_id OR s.restores = a.annotation_id) AND NOT s.retracted
               AND NOT EXISTS (SELECT FROM rft.annotation n WHERE n.supersedes = s.annotation_id)
           WHERE a.annotation_id = ed.annotation_id) END::text AS edit,
       e.segment_id, e.segment_row, x.experience_id IS NOT NULL AS purged
FROM rft.rollout_group g
JOIN rft.run r USING (run_id)
JOIN rft.task t USING (task_id)
JOIN rft.rollout o USING (group_id)
LEFT JOIN rft.experience e ON e.rollout_id = o.rollout_id AND e.group_id = g.group_id
LEFT JOIN rft.group_prompt gp ON gp.group_id = e.group_id AND gp.prompt_digest = e.prompt_digest
LEFT JOIN rft.policy_version p ON p.policy_version_id = e.policy_version_min
LEFT JOIN rft.group_baseline b ON b.group_id = g.group_id
LEFT JOIN rft.group_origin go ON go.group_id = g.group_id
LEFT JOIN rft.experience_origin eo ON eo.experience_id = e.experience_id
LEFT JOIN rft.purged_experience x ON x.experience_id = e.experience_id
LEFT JOIN rft.edited_response ed ON ed.experience_id = e.experience_id
WHERE g.group_id = ANY (%(group_ids)s)
ORDER BY g.run_id, g.ordinal, o.rollout_index, e.turn_index;

-- name: export_labels (read)
-- All labels of experiences, the oldest first.
SELECT experience_id, turn, old_value, new_value, author, session_user_name, source::text AS source, reason, label_batch_id, final, labelled_at
FROM rft.label WHERE experience_id = ANY (%(experience_ids)s) ORDER BY label_id;

-- name: export_annotations (read)
-- Annotations that stand about experiences, and of their rollouts and groups those that go with them.
SELECT a.experience_id, (to_jsonb(a) - 'experience_id')::text AS annotation
FROM unnest(%(group_ids)s::bigint[]) AS g (group_id)
CROSS JOIN LATERAL (
    SELECT v.* FROM rft.experience e JOIN rft.v_annotation_in_file v USING (experience_id)
    WHERE e.group_id = g.group_id AND EXISTS (SELECT FROM rft.annotation n WHERE n.group_id = g.group_id)) a
ORDER BY a.experience_id, a.made_at, a.kind;

-- name: export_comments (read)
-- Comments on experiences, and of those on their rollouts and groups the ones that go with them.
SELECT c.experience_id, (to_jsonb(c) - 'experience_id')::text AS comment
FROM unnest(%(group_ids)s::bigint[]) AS g (group_id)
CROSS JOIN LATERAL (
    SELECT v.* FROM rft.experience e JOIN rft.v_comment_in_file v USING (experience_id)
    WHERE e.group_id = g.group_id AND EXISTS (SELECT FROM rft.comment n WHERE n.group_id = g.group_id)) c
ORDER BY c.experience_id, c.made_at;

-- name: import_comments
-- Store comments of a file on experiences that this transaction has stored.
SELECT rft.import_comments(%(comments)s::jsonb);

-- name: check_imported_annotations
-- Refuse annotations of a file that cannot be stored.
SELECT rft.check_imported_annotations(%(annotations)s::jsonb);

-- name: import_annotations
-- Store annotations of a file about experiences that this transaction has stored.
SELECT rft.import_annotations(%(annotations)s::jsonb);

-- name: link_imported_edits
-- Link imported renderings with the edits of their parents.
SELECT rft.link_imported_edits();

-- name: import_target (read)
-- The run that an earlier import of this run created.
SELECT * FROM rft.run WHERE config -> 'import' ->> 'buffer_id' = %(buffer_id)s::text AND (config -> 'import' ->> 'run_id')::bigint = %(origin_run_id)s
ORDER BY run_id LIMIT 1;

-- name: may_import_labels (read)
-- Whether this account may write labels as they were given elsewhere.
SELECT has_table_privilege('rft.label', %(right)s) AS may;

-- name: interrupted_import (read)
-- The import of a file into a run that did not finish.
SELECT digest, started_at FROM rft.import_file WHERE run_id = %(run_id)s AND path = %(path)s AND finished_at IS NULL;

-- name: insert_import
-- Record that the import of a file into some runs begins, or continues.
INSERT INTO rft.import_file (run_id, path, digest) SELECT run_id, %(path)s, %(digest)s FROM unnest(%(run_ids)s::bigint[]) AS i (run_id)
ON CONFLICT (run_id, path) DO UPDATE SET digest = excluded.digest, started_at = excluded.started_at, finished_at = NULL;

-- name: finish_import
-- Record that all groups of a file are stored.
UPDATE rft.import_file SET finished_at = clock_timestamp() WHERE run_id = ANY (%(run_ids)s) AND path = %(path)s;

-- name: imported_groups (read)
-- The groups of a buffer that a run already has, with their experiences. The lookups go from the lists to the tables, key by key, so that
-- an import reads in proportion to its file and not to the buffer.
SELECT go.origin_group_id,
       (SELECT array_agg(eo.origin_experience_id) FROM rft.experience e
        CROSS JOIN LATERAL (
            SELECT origin_experience_id FROM rft.experience_origin WHERE experience_id = e.experience_id OFFSET 0) eo
        WHERE e.group_id = go.group_id) AS experience_ids
FROM unnest(%(group_ids)s::bigint[]) AS i (group_id)
CROSS JOIN LATERAL (
    SELECT origin_group_id, group_id FROM rft.group_origin
    WHERE run_id = %(run_id)s AND buffer_id = %(buffer_id)s::text::uuid AND origin_group_id = i.group_id OFFSET 0) go;

-- name: imported_experiences (read)
-- Experiences of one run by their ids in the buffer they came from; key by key, as in `imported_groups`.
SELECT eo.origin_experience_id, eo.experience_id
FROM unnest(%(origin_ids)s::bigint[]) AS i (origin_id)
CROSS JOIN LATERAL (
    SELECT origin_experience_id, experience_id FROM rft.experience_origin WHERE origin_experience_id = i.origin_id OFFSET 0) eo
CROSS JOIN LATERAL (SELECT group_id FROM rft.experience WHERE experience_id = eo.experience_id OFFSET 0) e
CROSS JOIN LATERAL (SELECT run_id, buffer_id FROM rft.group_origin WHERE group_id = e.group_id OFFSET 0) go
WHERE go.run_id = %(run_id)s AND go.buffer_id = %(buffer_id)s::text::uuid;

-- name: tasks_that_differ (read)
-- The first stored task whose content differs. Scores of a task pipeline are not compared, nor are features set by hand here.
SELECT t.taskset, t.task_key
FROM unnest(%(tasksets)s::text[], %(task_keys)s::text[], %(payloads)s::jsonb[], %(features)s::jsonb[]) AS n (taskset, task_key, payload, features)
CROSS JOIN LATERAL (
    SELECT task_id, taskset, task_key, payload, source_features, features, manual_features FROM rft.task
    WHERE taskset = n.taskset AND task_key = n.task_key OFFSET 0) t
CROSS JOIN LATERAL (SELECT ARRAY(SELECT jsonb_object_keys(t.manual_features)) AS names) by_hand
WHERE (t.payload, coalesce(t.source_features, t.features) - by_hand.names) IS DISTINCT FROM (n.payload, n.features - by_hand.names)
ORDER BY t.task_id LIMIT 1;

-- name: origins_of_experience (read)
-- The buffer and run that an experience comes from, and earlier ones, nearest first.
SELECT go.buffer_id::text AS buffer_id, go.origin_run AS run, eo.origin_experience_id AS experience_id, eo.policy_step, eo.sampled_at,
       go.imported_at, go.buffer_id = (SELECT buffer_id FROM rft.buffer) AS same_buffer, eo.earlier
FROM rft.experience_origin eo JOIN rft.experience e USING (experience_id) JOIN rft.group_origin go USING (group_id)
WHERE eo.experience_id = %(experience_id)s;

-- name: copies_of_experience (read)
-- Imports of an experience of this buffer into runs of this buffer.
SELECT r.name AS run, eo.experience_id
FROM rft.experience_origin eo JOIN rft.experience e USING (experience_id) JOIN rft.group_origin go USING (group_id)
JOIN rft.buffer i ON i.buffer_id = go.buffer_id JOIN rft.run r ON r.run_id = go.run_id
WHERE eo.origin_experience_id = %(experience_id)s ORDER BY eo.experience_id;
