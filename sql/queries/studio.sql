-- name: studio_rights (read)
-- What the account of a session may do; also for an account that may not even read.
SELECT session_user::text AS account,
       has_schema_privilege('rft', 'USAGE') AND has_table_privilege('rft.experience', 'SELECT') AS may_read,
       has_schema_privilege('rft', 'USAGE') AND has_column_privilege('rft.experience', 'reward', 'UPDATE') AS may_label;

-- name: studio_room (read)
-- The buffer, how many connections its server has, and whether it refuses another one of an account: all are used, or all that the
-- account or the database may have.
SELECT (SELECT buffer_id FROM rft.buffer) AS buffer_id, s.num_connections, s.num_connections - s.num_reserved <= a.num_open OR EXISTS (
           SELECT FROM pg_roles r WHERE r.rolname = %(account)s AND r.rolconnlimit >= 0 AND r.rolconnlimit <= a.num_own) OR EXISTS (
           SELECT FROM pg_database d WHERE d.datname = current_database() AND d.datconnlimit >= 0 AND d.datconnlimit <= a.num_here) AS is_full
FROM (SELECT current_setting('max_connections')::integer AS num_connections,
             current_setting('superuser_reserved_connections')::integer
             + coalesce(current_setting('reserved_connections', true)::integer, 0) AS num_reserved) s,
     (SELECT count(*) AS num_open, count(*) FILTER (WHERE usename = %(account)s) AS num_own,
             count(*) FILTER (WHERE datname = current_database()) AS num_here
      FROM pg_stat_activity WHERE datid IS NOT NULL AND usesysid IS NOT NULL) a;

-- name: ids_of_run (read)
-- The first and the last experience of a run; NULL without a run. Comparisons of rows, because only the index by run has their order.
SELECT (SELECT experience_id FROM rft.experience WHERE (run_id, experience_id) >= (%(run_id)s, 0) ORDER BY run_id, experience_id LIMIT 1) AS first,
       (SELECT experience_id FROM rft.experience WHERE (run_id, experience_id) < (%(run_id)s + 1, 0) ORDER BY run_id DESC, experience_id DESC LIMIT 1) AS last;

-- name: studio_items (read)
-- What a person needs to judge experiences, with the newest label of each.
SELECT e.experience_id, e.group_id, e.rollout_id, r.name AS run, t.taskset, t.task_key, t.payload ->> 'answer' AS answer, gp.prompt, e.response,
       rft.chat(gp.messages, e.response_messages, e.response) AS messages, e.reward, e.reward_parts, e.finish_reason, e.num_response_tokens,
       (SELECT o.num_turns FROM rft.rollout o WHERE o.rollout_id = e.rollout_id) AS num_turns,
       (SELECT max(l.label_id) FROM rft.label l WHERE l.experience_id = e.experience_id AND l.turn IS NULL) AS label_id
FROM rft.experience e
JOIN rft.run r USING (run_id)
JOIN rft.rollout_group g USING (group_id)
LEFT JOIN rft.task t ON t.task_id = g.task_id
LEFT JOIN rft.group_prompt gp ON gp.group_id = e.group_id AND gp.prompt_digest = e.prompt_digest
WHERE e.experience_id = ANY (%(experience_ids)s);

-- name: studio_runs_with_reviews (read)
-- Runs with questions that wait for a person, to choose one.
SELECT r.run_id, r.name FROM rft.run r
WHERE EXISTS (SELECT FROM rft.review w WHERE w.run_id = r.run_id AND w.answer IS NULL AND w.deadline > rft.clock()) ORDER BY r.run_id DESC LIMIT 50;

-- name: studio_group (read)
-- The experiences of a group side by side, those of one rollout after each other.
SELECT experience_id, rollout_id, rollout_index, turn_index, role, response, messages, prompt, reward, reward_shaped, state, dropped_by, dropped_because, num_labels,
       finish_reason, num_response_tokens, source::text AS source
FROM rft.v_experience WHERE group_id = %(group_id)s ORDER BY rollout_index NULLS LAST, turn_index, experience_id;

-- name: studio_experiences_to_label (read)
-- Experiences that the account has not labelled with a kind, in the order of their ids, after one. Without archived and purged ones.
-- The search begins where a run begins, and reads no older runs.
SELECT e.experience_id AS target_id, e.group_id, ARRAY[e.experience_id] AS experience_ids
FROM rft.experience e
WHERE e.experience_id > greatest(%(after)s, (
        SELECT f.experience_id - 1 FROM rft.experience f WHERE (f.run_id, f.experience_id) >= (%(run_id)s, 0) ORDER BY f.run_id, f.experience_id LIMIT 1))
  AND (%(run_id)s::bigint IS NULL OR e.run_id = %(run_id)s)
  AND NOT EXISTS (SELECT FROM rft.archive x WHERE x.run_id = e.run_id AND x.archived_at IS NOT NULL)
  AND NOT EXISTS (SELECT FROM rft.purged_experience p WHERE p.experience_id = e.experience_id)
  AND NOT EXISTS (SELECT FROM rft.v_annotation a WHERE a.target_id = e.experience_id AND a.kind = %(kind)s AND a.source = 'human' AND a.session_user_name = session_user)
ORDER BY e.experience_id LIMIT %(count)s;

-- name: studio_rollouts_to_label (read)
-- Rollouts that the account has not labelled with a kind; see studio_experiences_to_label. OFFSET 0: they are looked at in their order, one after another.
SELECT o.rollout_id AS target_id, o.group_id,
       ARRAY(SELECT e.experience_id FROM rft.experience e WHERE e.group_id = o.group_id AND e.rollout_id = o.rollout_id ORDER BY e.turn_index, e.experience_id) AS experience_ids
FROM (
    SELECT o.rollout_id, o.group_id, g.run_id FROM rft.rollout o JOIN rft.rollout_group g USING (group_id)
    WHERE o.rollout_id > %(after)s AND (%(run_id)s::bigint IS NULL OR g.run_id = %(run_id)s) ORDER BY o.rollout_id OFFSET 0) o
WHERE NOT EXISTS (SELECT FROM rft.archive x WHERE x.run_id = o.run_id AND x.archived_at IS NOT NULL)
  AND NOT EXISTS (SELECT FROM rft.experience e JOIN rft.purged_experience p USING (experience_id) WHERE e.group_id = o.group_id AND e.rollout_id = o.rollout_id)
  AND NOT EXISTS (SELECT FROM rft.v_annotation a WHERE a.target_id = o.rollout_id AND a.kind = %(kind)s AND a.source = 'human' AND a.session_user_name = session_user)
ORDER BY o.rollout_id LIMIT %(count)s;

-- name: studio_groups_to_label (read)
-- Groups with at least two experiences that the account has not labelled with a kind; see studio_rollouts_to_label.
SELECT g.group_id AS target_id, g.group_id, e.experience_ids
FROM (
    SELECT group_id, run_id FROM rft.rollout_group
    WHERE group_id > %(after)s AND (%(run_id)s::bigint IS NULL OR run_id = %(run_id)s) ORDER BY group_id OFFSET 0) g
CROSS JOIN LATERAL (
    SELECT array_agg(e.experience_id ORDER BY e.experience_id) AS experience_ids FROM rft.experience e WHERE e.group_id = g.group_id) e
WHERE cardinality(e.experience_ids) >= 2
  AND NOT EXISTS (SELECT FROM rft.archive x WHERE x.run_id = g.run_id AND x.archived_at IS NOT NULL)
  AND NOT EXISTS (SELECT FROM rft.purged_experience p WHERE p.experience_id = ANY (e.experience_ids))
  AND NOT EXISTS (SELECT FROM rft.v_annotation a WHERE a.target_id = g.group_id AND a.kind = %(kind)s AND a.source = 'human' AND a.session_user_name = session_user)
ORDER BY g.group_id LIMIT %(count)s;

-- name: studio_tasks_to_label (read)
-- Tasks that the account has not labelled with a kind; see studio_experiences_to_label.
SELECT t.task_id AS target_id, NULL::bigint AS group_id, '{}'::bigint[] AS experience_ids, t.taskset, t.task_key, t.payload
FROM rft.task t
WHERE t.task_id > %(after)s AND t.payload <> '{"purged": true}'
  AND (%(run_id)s::bigint IS NULL OR EXISTS (SELECT FROM rft.rollout_group g WHERE g.run_id = %(run_id)s AND g.task_id = t.task_id))
  AND NOT EXISTS (SELECT FROM rft.v_annotation a WHERE a.target_id = t.task_id AND a.kind = %(kind)s AND a.source = 'human' AND a.session_user_name = session_user)
ORDER BY t.task_id LIMIT %(count)s;

-- name: studio_annotated (read)
-- How many targets stand labelled with each kind, or with one, by this account and by all whose labels it may see.
SELECT a.kind, count(*) FILTER (WHERE a.session_user_name = session_user) AS mine, count(*) AS num_all FROM rft.annotation a
WHERE (%(kind)s::text IS NULL OR a.kind = %(kind)s) AND a.source = 'human' AND NOT a.retracted
  AND NOT EXISTS (SELECT FROM rft.annotation s WHERE s.supersedes = a.annotation_id)
GROUP BY a.kind;

-- name: studio_suggestions (read)
-- What judges say about targets: suggestions to a person.
SELECT annotation_id, target_id, value, model, confidence, reason FROM rft.v_annotation
WHERE kind = %(kind)s AND target_id = ANY (%(target_ids)s) AND source = 'judge' ORDER BY annotation_id;

-- name: studio_annotations (read)
-- What stands about an experience, its rollout, its group and its task.
SELECT a.* FROM rft.v_annotation a
WHERE (a.target = 'experience' AND a.target_id = %(experience_id)s) OR (a.target = 'rollout' AND a.target_id = %(rollout_id)s)
   OR (a.target = 'group' AND a.target_id = %(group_id)s) ORDER BY a.annotation_id DESC LIMIT 200;

-- name: studio_newest_runs (read)
-- The newest runs, to choose one.
SELECT run_id, name FROM rft.run ORDER BY run_id DESC LIMIT 50;
