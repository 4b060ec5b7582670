-- name: purge_of_experience (read)
-- Author, time and reason of the purge of an experience.
SELECT purge_id, author, reason, purged_at FROM rft.v_purged WHERE experience_id = %(experience_id)s;

-- name: purge_candidates (read)
-- The given experiences that are not purged yet, with the place of their arrays. They are in the order of segments, so that each segment is
-- written again only once.
SELECT e.experience_id, e.segment_id, e.segment_row, f.uri, s.offset_bytes, s.length_bytes, s.checksum, rft.version_of_experience(e) AS version
FROM rft.experience e JOIN rft.segment s USING (segment_id) JOIN rft.segment_file f USING (file_id)
WHERE e.experience_id = ANY (%(experience_ids)s)
  AND NOT EXISTS (SELECT FROM rft.purged_experience x WHERE x.experience_id = e.experience_id)
ORDER BY e.segment_id, e.segment_row;

-- name: sharers_of_arrays
-- Copies of experiences: other experiences at the same address, which would lose their arrays too.
SELECT s.experience_id, array_agg(s.shares_with) AS shares_with
FROM rft.sharers_of_arrays(%(experience_ids)s) s
LEFT JOIN unnest(%(experience_ids)s::bigint[]) given (experience_id) USING (experience_id)
WHERE given.experience_id IS NULL
GROUP BY s.experience_id;

-- name: being_trained_on (read)
-- Experiences in a batch that a live trainer has drawn, with the step neither recorded as done nor covered by a checkpoint: their arrays
-- are being read.
SELECT d.experience_id, d.trainer_step, r.name AS run
FROM rft.run r
JOIN rft.run_attempt a ON a.attempt_id = r.current_attempt_id AND a.ended_at IS NULL AND a.lease_until > rft.clock()
JOIN rft.draw d ON d.attempt_id = a.attempt_id
WHERE d.experience_id = ANY (%(experience_ids)s)
  AND NOT EXISTS (SELECT FROM rft.train_step t WHERE t.attempt_id = d.attempt_id AND t.trainer_step = d.trainer_step)
  AND NOT EXISTS (SELECT FROM rft.checkpoint c WHERE c.attempt_id = d.attempt_id AND c.trainer_step >= d.trainer_step)
ORDER BY d.experience_id;

-- name: begin_purge
-- Record that a purge begins, or continue the same one that was interrupted; return its id. The caller has the turn to move segments, so
-- no other process works on it.
WITH interrupted AS (
    SELECT purge_id FROM rft.purge
    WHERE finished_at IS NULL AND (kind, selection, reason, author, tasks_too, session_user_name)
        = (%(kind)s, %(selection)s, %(reason)s, %(author)s, %(tasks_too)s, session_user::text)
    ORDER BY purge_id LIMIT 1),
begun AS (
    INSERT INTO rft.purge (kind, selection, reason, author, tasks_too)
    SELECT %(kind)s, %(selection)s, %(reason)s, %(author)s, %(tasks_too)s WHERE NOT EXISTS (SELECT FROM interrupted) RETURNING purge_id)
SELECT purge_id FROM interrupted UNION ALL SELECT purge_id FROM begun;

-- name: lock_purged
-- Lock experiences that are to be purged, with their groups and runs. Returns the versions of their rows.
SELECT experience_id, version FROM rft.lock_purged(%(experience_ids)s);

-- name: purge_texts
-- Remove the texts of experiences; return how many had not been purged before.
SELECT rft.purge_texts(%(experience_ids)s, %(purge_id)s, %(tasks_too)s) AS purged;

-- name: unanswered_tasks (read)
-- Tasks with texts and without an experience, with those columns of rft.v_experience that such a task has.
SELECT t.task_id, t.taskset, t.task_key, t.payload ->> 'prompt' AS prompt, t.payload ->> 'answer' AS answer
FROM rft.task t
WHERE t.payload <> '{"purged": true}'
  AND NOT EXISTS (SELECT FROM rft.rollout_group g JOIN rft.experience e USING (group_id) WHERE g.task_id = t.task_id);

-- name: purge_tasks
-- Remove the texts of tasks and of what is stored about them.
SELECT set_config('rft.purge', %(purge_id)s::text, true), rft.purge_tasks(%(task_ids)s, %(purge_id)s), rft.purge_errors('{}', %(task_ids)s, %(purge_id)s);

-- name: unpurged_sharers
-- Copies that a fork created after the purge had looked for them. Asked once the groups are locked and abandoned.
SELECT s.experience_id FROM rft.sharers_of_arrays(%(experience_ids)s) s
WHERE NOT EXISTS (SELECT FROM rft.purged_experience x WHERE x.experience_id = s.experience_id OFFSET 0)
ORDER BY s.experience_id LIMIT 1;

-- name: retire_ranges
-- Record where segments were before they were written again, and the checksum by which stored selections know them.
WITH r AS (
    SELECT * FROM unnest(%(segment_ids)s::bigint[], %(uris)s::text[], %(offsets)s::bigint[], %(lengths)s::bigint[], %(checksums)s::text[])
        AS u (segment_id, uri, offset_bytes, length_bytes, checksum)),
first AS (
    UPDATE rft.segment s SET first_checksum = r.checksum FROM r WHERE s.segment_id = r.segment_id AND s.first_checksum IS NULL)
INSERT INTO rft.retired_range (purge_id, uri, offset_bytes, length_bytes)
SELECT %(purge_id)s, uri, offset_bytes, length_bytes FROM r;

-- name: purged_of_draw (read)
-- The first purged experience of a step's batch.
SELECT d.experience_id, x.reason FROM rft.draw d JOIN rft.v_purged x USING (experience_id)
WHERE d.attempt_id = %(attempt_id)s AND d.trainer_step = %(step)s ORDER BY d.slot LIMIT 1;

-- name: count_purged
-- Add to the totals of a purge.
UPDATE rft.purge SET num_experiences = num_experiences + %(num_experiences)s, num_array_bytes = num_array_bytes + %(num_bytes)s
WHERE purge_id = %(purge_id)s;

-- name: finish_purge
-- Record that a purge is complete.
UPDATE rft.purge SET finished_at = clock_timestamp() WHERE purge_id = %(purge_id)s;

-- name: finish_interrupted_purge
-- Record that a purge is complete whose process ended before it could: all its experiences are purged.
UPDATE rft.purge SET finished_at = clock_timestamp()
WHERE finished_at IS NULL AND (kind, selection, reason, author, tasks_too, session_user_name)
    = (%(kind)s, %(selection)s, %(reason)s, %(author)s, %(tasks_too)s, session_user::text);

-- name: retire_unnamed_ranges
-- Retire the ranges of files, within their committed sizes, that neither a segment nor a retired range names: of writes that were not committed,
-- and of segments that have moved. They belong to the newest purge; without one there is nothing to overwrite.
WITH named AS (
    SELECT uri, range_agg(int8range(offset_bytes, offset_bytes + length_bytes)) AS ranges
    FROM (SELECT f.uri, s.offset_bytes, s.length_bytes FROM rft.segment s JOIN rft.segment_file f USING (file_id)
          UNION ALL
          SELECT uri, offset_bytes, length_bytes FROM rft.retired_range) known
    GROUP BY uri)
INSERT INTO rft.retired_range (purge_id, uri, offset_bytes, length_bytes)
SELECT p.purge_id, f.uri, lower(unnamed), upper(unnamed) - lower(unnamed)
FROM (SELECT max(purge_id) AS purge_id FROM rft.purge) p
CROSS JOIN rft.segment_file f
LEFT JOIN named n ON n.uri = f.uri
CROSS JOIN LATERAL unnest(int8multirange(int8range(0, f.size_bytes)) - coalesce(n.ranges, '{}')) unnamed
WHERE p.purge_id IS NOT NULL AND f.uri = ANY (%(uris)s) AND f.retired_at IS NULL;

-- name: ranges_to_erase (read)
-- Retired byte ranges that may be overwritten; never a range that a segment refers to, whatever a restored backup contains.
SELECT retired_range_id, uri, offset_bytes, length_bytes FROM rft.retired_range
WHERE erased_at IS NULL AND retired_at < rft.clock() - %(grace_s)s * interval '1 s'
  AND NOT EXISTS (
      SELECT FROM rft.segment s JOIN rft.segment_file f USING (file_id)
      WHERE f.uri = retired_range.uri AND s.offset_bytes < retired_range.offset_bytes + retired_range.length_bytes
        AND retired_range.offset_bytes < s.offset_bytes + s.length_bytes)
ORDER BY retired_range_id;

-- name: range_is_erased
-- Record that retired bytes were overwritten.
UPDATE rft.retired_range SET erased_at = clock_timestamp() WHERE retired_range_id = %(retired_range_id)s;

-- name: ranges_left (read)
-- Number of retired ranges and bytes that wait to be overwritten, and the oldest.
SELECT count(*) AS ranges, coalesce(sum(length_bytes), 0)::bigint AS num_bytes, min(retired_at) AS oldest
FROM rft.retired_range WHERE erased_at IS NULL;

-- name: sessions_in_database (read)
-- Programs with other sessions in this database. An ordinary account sees little more of other accounts' sessions than that they exist.
SELECT DISTINCT application_name FROM pg_stat_activity
WHERE datname = current_database() AND coalesce(backend_type, 'client backend') = 'client backend' AND pid <> ALL (%(own_pids)s::integer[]) ORDER BY 1;

-- name: tasks_of_purged (read)
-- Number of tasks that still have texts although all or some of their experiences are purged.
SELECT count(DISTINCT g.task_id) AS num_tasks FROM rft.experience e JOIN rft.rollout_group g USING (group_id) JOIN rft.task t USING (task_id)
WHERE e.experience_id = ANY (%(experience_ids)s) AND t.payload <> '{"purged": true}';

-- name: experiences_beside (read)
-- All experiences of the tasks of these ones.
SELECT e.experience_id FROM rft.experience e JOIN rft.rollout_group g USING (group_id)
WHERE g.task_id IN (
    SELECT g.task_id FROM rft.experience e JOIN rft.rollout_group g USING (group_id) WHERE e.experience_id = ANY (%(experience_ids)s));

-- name: made_of_purged (read)
-- Experiences and tasks that stages created from experiences, and from their tasks with `tasks_too`, directly or indirectly, and that still have
-- texts. The experiences themselves and their copies are not included.
WITH RECURSIVE made (experience_id) AS (
    SELECT unnest(%(experience_ids)s::bigint[])
    UNION
    SELECT e.experience_id FROM made m JOIN rft.experience e ON e.parent_id = m.experience_id),
made_task (task_id) AS (
    SELECT t.task_id FROM made
    JOIN rft.task t ON t.features ? 'parent_experience_id' AND t.features ->> 'parent_experience_id' = made.experience_id::text
    UNION
    SELECT t.task_id FROM rft.experience e JOIN rft.rollout_group g USING (group_id)
    JOIN rft.task t ON t.features ->> 'parent_task_id' = g.task_id::text
    WHERE %(tasks_too)s AND e.experience_id = ANY (%(experience_ids)s)
    UNION
    SELECT t.task_id FROM made_task m JOIN rft.task t ON t.features ->> 'parent_task_id' = m.task_id::text)
SELECT (SELECT coalesce(array_agg(e.experience_id ORDER BY e.experience_id), '{}') FROM made JOIN rft.experience e USING (experience_id)
        WHERE NOT EXISTS (SELECT FROM unnest(%(experience_ids)s::bigint[]) g (experience_id) WHERE g.experience_id = e.experience_id)
          AND NOT EXISTS (SELECT FROM rft.purged_experience x WHERE x.experience_id = e.experience_id)) AS experience_ids,
       (SELECT coalesce(array_agg(task_id ORDER BY task_id), '{}') FROM made_task) AS task_ids;

-- name: purged_rows (read)
-- The purged rows of each segment.
SELECT segment_id, array_agg(segment_row ORDER BY segment_row) AS rows FROM rft.purged_experience GROUP BY segment_id;

-- name: retention_groups (read)
-- Groups with the facts that a rule reads, newest first: all, or those of some experiences. protected: rules skip the group. A group is protected while a person's label or
-- preference refers to it, while it is open, and while it may still be trained on. A group without verdicts is open while a question about it
-- waits for a person, or its run can still decide on it: not if it was imported, or relabelled after the end of its run. It may still be
-- trained on if a run that has not finished could draw it, now or again after going back to its last checkpoint, or trains on a stored
-- selection that contains it.
WITH chosen AS (
    SELECT w.item_kind, w.item_id FROM rft.run r JOIN rft.worklist w ON w.run_id = r.run_id AND w.consumer = 'selection' AND w.item_kind = r.source_kind
    WHERE r.status <> 'finished'),
selected AS (
    SELECT item_id AS experience_id FROM chosen WHERE item_kind = 'experience'
    UNION
    SELECT m.experience_id FROM chosen c JOIN rft.preference_pair p ON p.pair_id = c.item_id
    CROSS JOIN LATERAL (VALUES (p.chosen_id), (p.rejected_id)) AS m (experience_id) WHERE c.item_kind = 'pair'
    UNION
    SELECT e.experience_id FROM chosen c JOIN rft.experience e ON e.group_id = c.item_id WHERE c.item_kind = 'group')
SELECT g.group_id, t.taskset, count(*) AS num_experiences, max(e.created_at) AS created_at,
       (sum(octet_length(e.response) + coalesce(octet_length(e.response_messages::text), 0) + s.length_bytes / greatest(s.num_rows, 1))
        + (SELECT sum(octet_length(p.prompt) + coalesce(octet_length(p.messages::text), 0))
           FROM rft.group_prompt p WHERE p.group_id = g.group_id))::bigint AS num_bytes,
       array_agg(e.experience_id) AS experience_ids,
       (%(keep_labelled)s AND bool_or(
           EXISTS (SELECT FROM rft.label l WHERE l.experience_id = e.experience_id)
           OR EXISTS (SELECT FROM rft.annotation a WHERE a.group_id = e.group_id AND NOT a.retracted AND a.source NOT IN ('judge', 'rule'))
           OR EXISTS (SELECT FROM rft.comment c WHERE c.group_id = e.group_id)
           OR EXISTS (SELECT FROM rft.preference_pair p WHERE p.source = 'human' AND p.chosen_id = e.experience_id)
           OR EXISTS (SELECT FROM rft.preference_pair p WHERE p.source = 'human' AND p.rejected_id = e.experience_id)))
       OR bool_or(picked.experience_id IS NOT NULL)
       OR (g.left_by IS NULL AND (g.status IN ('planned', 'claimed')
           OR g.status = 'sealed' AND r.status <> 'finished' AND (r.current_attempt_id IS NOT NULL OR r.run_id = %(starting_run_id)s::bigint)
           OR g.status = 'sealed' AND EXISTS (
               SELECT FROM rft.review v WHERE v.group_id = g.group_id AND v.answer IS NULL AND v.deadline > rft.clock())))
       OR (g.trainable AND r.status <> 'finished' AND (r.current_attempt_id IS NOT NULL OR r.run_id = %(starting_run_id)s::bigint) AND (
           NOT EXISTS (SELECT FROM rft.v_consumption c WHERE c.run_id = g.run_id AND c.item_id = g.group_id)
           OR EXISTS (SELECT FROM rft.worklist w WHERE w.run_id = g.run_id AND w.consumer = 'trainer' AND w.item_kind = 'group' AND w.item_id = g.group_id
                      AND (w.available OR w.resume_step IS NOT NULL))))
       AS protected
FROM rft.rollout_group g
JOIN rft.run r USING (run_id)
JOIN rft.task t USING (task_id)
JOIN rft.experience e ON e.group_id = g.group_id
JOIN rft.segment s USING (segment_id)
LEFT JOIN selected picked ON picked.experience_id = e.experience_id
WHERE NOT EXISTS (SELECT FROM rft.purged_experience x WHERE x.experience_id = e.experience_id)
  AND (%(experience_ids)s::bigint[] IS NULL OR g.group_id IN (SELECT i.group_id FROM rft.experience i WHERE i.experience_id = ANY (%(experience_ids)s)))
GROUP BY g.group_id, t.taskset, r.run_id
ORDER BY max(e.created_at) DESC, g.group_id DESC;
