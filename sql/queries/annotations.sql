-- name: define_label_kind
-- Define a kind of label; no row if nothing of it changed.
INSERT INTO rft.label_kind (kind, type, target, spec, level, blind, reopens, instruction, author)
VALUES (%(kind)s, %(type)s::rft.label_type, %(target)s::rft.label_target, %(spec)s, %(level)s::rft.label_level, %(blind)s, %(reopens)s,
        %(instruction)s, %(author)s)
RETURNING kind, version, type::text AS type, target::text AS target, spec, level::text AS level, blind, reopens, instruction;

-- name: label_kinds (read)
-- The kinds to label with.
SELECT kind, version, type::text AS type, target::text AS target, spec, level::text AS level, blind, reopens, instruction, author, made_at
FROM rft.v_label_kind ORDER BY kind;

-- name: label_kind_versions (read)
-- All versions of a kind, newest first.
SELECT kind, version, type::text AS type, target::text AS target, spec, level::text AS level, blind, reopens, instruction, author, session_user_name,
       made_at, retired_at
FROM rft.label_kind WHERE kind = %(kind)s ORDER BY version DESC;

-- name: retire_label_kind
-- Retire all versions of a kind.
UPDATE rft.label_kind SET retired_at = clock_timestamp() WHERE kind = %(kind)s AND retired_at IS NULL;

-- name: lock_annotations
-- Lock the targets of annotations in one order.
SELECT rft.lock_annotations(%(kinds)s::text[], %(target_ids)s::bigint[]);

-- name: annotate
-- Store annotations, in the given order. The triggers check them and skip those whose key was stored before.
INSERT INTO rft.annotation (kind, kind_version, target_id, value, source, author, model, confidence, reason, shown, seconds, key)
SELECT n.kind, n.kind_version, n.target_id, n.value, n.source::rft.annotation_source, n.author, n.model, n.confidence, n.reason, n.shown, n.seconds, n.key
FROM unnest(%(kinds)s::text[], %(kind_versions)s::integer[], %(target_ids)s::bigint[], %(json_values)s::jsonb[], %(authors)s::text[], %(models)s::text[],
            %(confidences)s::double precision[], %(words)s::text[], %(shown)s::jsonb[], %(seconds)s::double precision[], %(keys)s::text[], %(sources)s::text[])
     WITH ORDINALITY AS n (kind, kind_version, target_id, value, author, model, confidence, reason, shown, seconds, key, source, place)
ORDER BY n.place
RETURNING annotation_id, supersedes, key;

-- name: unchanged_annotations
-- Places, from 1, of annotations that stand already with this value and reason: by the same author, account and source, or, where there is none, of an
-- import by the same author, whose labels an export may have written to the file.
SELECT n.place, t.annotation_id
FROM unnest(%(kinds)s::text[], %(target_ids)s::bigint[], %(json_values)s::jsonb[], %(authors)s::text[], %(sources)s::text[], %(words)s::text[])
     WITH ORDINALITY AS n (kind, target_id, value, author, source, reason, place)
CROSS JOIN LATERAL (
    SELECT a.annotation_id, a.value, a.reason, o.is_own
    FROM (SELECT * FROM rft.annotation x WHERE x.target_id = n.target_id AND x.kind = n.kind OFFSET 0) a
    CROSS JOIN LATERAL (SELECT a.session_user_name = session_user AND a.source = n.source::rft.annotation_source AS is_own) o
    WHERE a.author = n.author AND NOT a.retracted
      AND (o.is_own OR n.source = 'import' AND a.source IN ('human', 'import', 'adjudication'))
      AND NOT EXISTS (SELECT FROM rft.annotation s WHERE s.supersedes = a.annotation_id)
    ORDER BY o.is_own DESC, a.value = n.value DESC, a.annotation_id DESC LIMIT 1) t
WHERE t.value = n.value AND (NOT t.is_own OR t.reason IS NOT DISTINCT FROM n.reason OR t.reason LIKE 'undo of label batch %%');

-- name: annotations_by_key (read)
-- Annotations that this account stored under keys.
SELECT annotation_id, key, label_batch_id FROM rft.annotation WHERE session_user_name = session_user AND key = ANY (%(keys)s);

-- name: standing_annotations (read)
-- Annotations that stand, newest first; only of a kind, a target or a group if one is named.
SELECT annotation_id, kind, kind_version, type::text AS type, target::text AS target, target_id, group_id, run, value, num, choice, source::text AS source,
       author, session_user_name, model, confidence, reason, shown, seconds, label_batch_id, supersedes, made_at
FROM rft.v_annotation
WHERE (%(kind)s::text IS NULL OR kind = %(kind)s)
  AND (%(target_id)s::bigint IS NULL OR target_id = %(target_id)s)
  AND (%(group_id)s::bigint IS NULL OR group_id = %(group_id)s)
ORDER BY annotation_id DESC LIMIT %(limit)s;

-- name: annotation_history (read)
-- All annotations, newest first; only of a kind, a target or a batch if one is named.
SELECT a.annotation_id, a.kind, a.kind_version, k.target::text AS target, a.target_id, a.value, a.source::text AS source, a.author, a.session_user_name,
       a.model, a.confidence, a.reason, a.seconds, a.label_batch_id, a.supersedes, a.restores, a.retracted, a.undone_by, a.undone_session_user_name, a.made_at
FROM rft.annotation a JOIN rft.label_kind k ON k.kind = a.kind AND k.version = a.kind_version
WHERE (%(kind)s::text IS NULL OR a.kind = %(kind)s)
  AND (%(target_id)s::bigint IS NULL OR a.target_id = %(target_id)s)
  AND (%(target)s::text IS NULL OR k.target = %(target)s::rft.label_target)
  AND (%(label_batch_id)s::bigint IS NULL OR a.label_batch_id = %(label_batch_id)s)
ORDER BY a.annotation_id DESC LIMIT %(limit)s;

-- name: annotations_of_batch (read)
-- Targets of the annotations of a batch.
SELECT kind, target_id FROM rft.annotation WHERE label_batch_id = %(label_batch_id)s;

-- name: undo_annotation_of_key
-- Undo the annotation that this account stored under a key.
SELECT undone_id, annotation_id, is_overruled FROM rft.undo_annotation_of_key(%(key)s, %(words)s);

-- name: undo_annotations
-- Undo the annotations of a batch.
SELECT undone_id, annotation_id, is_overruled FROM rft.undo_annotations(%(label_batch_id)s, %(words)s);

-- name: all_label_kinds (read)
-- All kinds of labels, retired ones too: their annotations stay.
SELECT DISTINCT kind FROM rft.label_kind ORDER BY kind;

-- name: labels_of_experiences
-- Annotations of kinds that stand about experiences, and about their rollouts, groups and tasks, the oldest first. Of each person the newest one;
-- suggestions and adjudications apart.
SELECT experience_id, kind, type, value, source
FROM (
    SELECT DISTINCT ON (e.experience_id, k.kind, c.part, c.person)
           e.experience_id, k.kind, a.type::text AS type, a.value, a.source::text AS source, a.annotation_id
    FROM unnest(%(experience_ids)s::bigint[]) AS i (experience_id)
    CROSS JOIN unnest(%(kinds)s::text[]) AS k (kind)
    CROSS JOIN LATERAL (SELECT target FROM rft.label_kind WHERE kind = k.kind LIMIT 1) d
    CROSS JOIN LATERAL (SELECT * FROM rft.experience WHERE experience_id = i.experience_id OFFSET 0) e
    CROSS JOIN LATERAL (SELECT task_id FROM rft.rollout_group WHERE group_id = e.group_id OFFSET 0) g
    CROSS JOIN LATERAL (
        SELECT * FROM rft.annotation
        WHERE target_id = CASE d.target WHEN 'experience' THEN e.experience_id WHEN 'rollout' THEN e.rollout_id WHEN 'group' THEN e.group_id ELSE g.task_id END
          AND kind = k.kind AND NOT retracted OFFSET 0) a
    CROSS JOIN LATERAL (
        SELECT CASE WHEN a.source IN ('judge', 'rule') THEN a.annotation_id WHEN a.source = 'adjudication' THEN -1 ELSE 0 END AS part,
               rft.person(a.author, a.session_user_name, (SELECT rft.shared_accounts())::text[]) AS person) c
    WHERE NOT EXISTS (SELECT FROM rft.annotation s WHERE s.supersedes = a.annotation_id)
    ORDER BY e.experience_id, k.kind, c.part, c.person, a.annotation_id DESC) one
ORDER BY annotation_id;

-- name: newest_annotations
-- The newest annotation of kinds about groups and what belongs to them.
SELECT g.group_id, a.annotation_id FROM unnest(%(group_ids)s::bigint[]) AS g (group_id)
CROSS JOIN LATERAL (
    SELECT annotation_id FROM rft.annotation WHERE group_id = g.group_id AND kind = ANY (%(kinds)s) ORDER BY annotation_id DESC LIMIT 1) a;

-- name: exported_annotations (read)
-- Annotations that stand, in the order in which they were stored; only of kinds or a run if they are named.
SELECT annotation_id, kind, kind_version, type::text AS type, target::text AS target, target_id, group_id, run, value, source::text AS source, author,
       session_user_name, model, confidence, reason, shown, seconds, label_batch_id, made_at
FROM rft.v_annotation
WHERE (%(kinds)s::text[] IS NULL OR kind = ANY (%(kinds)s)) AND (%(run_id)s::bigint IS NULL OR run_id = %(run_id)s)
ORDER BY annotation_id;

-- name: texts_of_targets (read)
-- The texts of what annotations are about: the prompt, and the responses with the ids of their experiences.
SELECT t.target, t.target_id, min(x.prompt) AS prompt,
       coalesce(jsonb_agg(jsonb_build_object('id', x.experience_id, 'response', x.response) ORDER BY x.experience_id) FILTER (WHERE x.experience_id IS NOT NULL), '[]')
           AS responses
FROM unnest(%(targets)s::text[], %(target_ids)s::bigint[]) AS t (target, target_id)
CROSS JOIN LATERAL (
    SELECT e.experience_id, p.prompt, e.response FROM rft.experience e
    LEFT JOIN rft.group_prompt p ON p.group_id = e.group_id AND p.prompt_digest = e.prompt_digest
    WHERE t.target = 'experience' AND e.experience_id = t.target_id
    UNION ALL
    SELECT e.experience_id, p.prompt, e.response FROM rft.rollout o JOIN rft.experience e ON e.group_id = o.group_id AND e.rollout_id = o.rollout_id
    LEFT JOIN rft.group_prompt p ON p.group_id = e.group_id AND p.prompt_digest = e.prompt_digest
    WHERE t.target = 'rollout' AND o.rollout_id = t.target_id
    UNION ALL
    SELECT e.experience_id, p.prompt, e.response FROM rft.experience e
    LEFT JOIN rft.group_prompt p ON p.group_id = e.group_id AND p.prompt_digest = e.prompt_digest
    WHERE t.target = 'group' AND e.group_id = t.target_id
    UNION ALL
    SELECT NULL, k.payload ->> 'prompt', NULL FROM rft.task k WHERE t.target = 'task' AND k.task_id = t.target_id) x
GROUP BY t.target, t.target_id;
