-- name: archive_of_run (read)
-- The archive of a run, if there is one.
SELECT a.*, r.name AS run FROM rft.archive a JOIN rft.run r USING (run_id) WHERE a.run_id = %(run_id)s;

-- name: archived_among (read)
-- The archived ones among runs; all archived runs if none is given.
SELECT r.run_id, r.name AS run FROM rft.archive a JOIN rft.run r USING (run_id)
WHERE a.status = 'archived' AND (%(run_ids)s::bigint[] IS NULL OR a.run_id = ANY (%(run_ids)s)) ORDER BY a.run_id;

-- name: archived_experiences_among (read)
-- The first experience of an archived run among experiences.
SELECT e.experience_id, r.name AS run FROM unnest(%(experience_ids)s::bigint[]) AS i (experience_id)
JOIN rft.experience e USING (experience_id) JOIN rft.archive a ON a.run_id = e.run_id AND a.status = 'archived'
JOIN rft.run r ON r.run_id = a.run_id ORDER BY e.experience_id LIMIT 1;

-- name: archives (read)
-- All archives with their run, oldest first, and the number of experiences that the database has of it.
SELECT a.*, r.name AS run,
       (SELECT count(*) FROM rft.rollout_group g JOIN rft.experience e USING (group_id) WHERE g.run_id = a.run_id) AS num_in_database
FROM rft.archive a JOIN rft.run r USING (run_id) ORDER BY a.run_id;

-- name: archive_files (read)
-- The files of complete archives: of one run, or of all.
SELECT f.run_id, r.name AS run, f.path, f.table_name, f.num_rows, f.num_bytes, f.checksum
FROM rft.archive_file f JOIN rft.archive a USING (run_id) JOIN rft.run r USING (run_id)
WHERE a.status = 'archived' AND (%(run_id)s::bigint IS NULL OR f.run_id = %(run_id)s) ORDER BY f.run_id, f.path;

-- name: archive_of_segments (read)
-- The archived runs that hold segments.
SELECT s.segment_id, r.name AS run FROM rft.archived_segment s JOIN rft.run r USING (run_id) WHERE s.segment_id = ANY (%(segment_ids)s);

-- name: begin_archive
-- Record that the files of a run's archive are being written. Another command that begins takes the run over.
INSERT INTO rft.archive (run_id, schema_version, author)
SELECT %(run_id)s, version_num, %(author)s FROM rft.schema_version
ON CONFLICT (run_id) DO UPDATE SET schema_version = excluded.schema_version, author = excluded.author,
    session_user_name = excluded.session_user_name, started_at = excluded.started_at
RETURNING started_at;

-- name: give_up_archive
-- Delete the record of an archive that moved nothing.
DELETE FROM rft.archive WHERE run_id = %(run_id)s AND status = 'writing' AND started_at = %(started_at)s;

-- name: archive_obstacles
-- What prevents a run from being archived: a process that works for it, a question that waits, runs that use its arrays, runs that will
-- train on its experiences. Copies have the experience that they share arrays with as parent.
SELECT r.status::text AS status,
       (SELECT format('%%s %%s on %%s', w.role, w.pid, w.host) FROM rft.worker w
        WHERE w.run_id = r.run_id AND w.stopped_at IS NULL AND w.heartbeat_at > rft.clock() - interval '15 s'
        ORDER BY w.worker_id LIMIT 1) AS worker,
       (SELECT format('process %%s on %%s', a.pid, a.host) FROM rft.run_attempt a
        WHERE a.attempt_id = r.current_attempt_id AND a.ended_at IS NULL AND a.lease_until > rft.clock()) AS trainer,
       (SELECT count(*) FROM rft.review w WHERE w.run_id = r.run_id AND w.answer IS NULL AND rft.clock() < w.deadline) AS num_reviews,
       (SELECT array_agg(DISTINCT x.name ORDER BY x.name) FROM rft.rollout_group g
        JOIN rft.experience e ON e.group_id = g.group_id
        JOIN rft.experience c ON c.parent_id = e.experience_id AND c.run_id <> e.run_id
            AND c.segment_id = e.segment_id AND c.segment_row = e.segment_row
        JOIN rft.run x ON x.run_id = c.run_id
        WHERE g.run_id = r.run_id AND NOT EXISTS (SELECT FROM rft.archive a WHERE a.run_id = c.run_id AND a.status = 'archived')) AS sharers,
       (SELECT array_agg(DISTINCT x.name ORDER BY x.name) FROM rft.run x
        JOIN rft.worklist w ON w.run_id = x.run_id AND w.consumer = 'selection' AND w.item_kind = x.source_kind
        CROSS JOIN LATERAL rft.selected_experiences(w.item_kind, w.item_id) s
        JOIN rft.experience e ON e.experience_id = s.experience_id
        WHERE x.status NOT IN ('finished', 'failed', 'interrupted') AND x.run_id <> r.run_id AND e.run_id = r.run_id) AS selecting
FROM rft.run r WHERE r.run_id = %(run_id)s;

-- name: archive_fingerprint (read)
-- A number that changes with every change of the rows that an archive holds, without reading their texts.
SELECT concat_ws(' ',
    (SELECT count(*) || ':' || coalesce(sum(hashtextextended(concat(e.ctid, e.xmin), 0)::numeric), 0)
     FROM rft.rollout_group g JOIN rft.experience e USING (group_id) WHERE g.run_id = %(run_id)s),
    (SELECT count(*) || ':' || coalesce(sum(hashtextextended(concat(p.ctid, p.xmin), 0)::numeric), 0)
     FROM rft.rollout_group g JOIN rft.group_prompt p USING (group_id) WHERE g.run_id = %(run_id)s),
    (SELECT count(*) || ':' || coalesce(sum(hashtextextended(concat(b.ctid, b.xmin), 0)::numeric), 0)
     FROM rft.rollout_group g JOIN rft.group_baseline b USING (group_id) WHERE g.run_id = %(run_id)s),
    (SELECT count(*) || ':' || coalesce(sum(hashtextextended(concat(s.ctid, s.xmin), 0)::numeric), 0)
     FROM rft.rollout_group g JOIN rft.experience e USING (group_id) JOIN rft.score s USING (experience_id) WHERE g.run_id = %(run_id)s),
    (SELECT count(*) || ':' || coalesce(sum(hashtextextended(concat(w.ctid, w.xmin), 0)::numeric), 0)
     FROM rft.worklist w WHERE w.run_id = %(run_id)s)
    ) AS fingerprint;

-- name: archive_totals (read)
-- Numbers of groups, experiences and tokens of a run.
SELECT (SELECT count(*) FROM rft.rollout_group WHERE run_id = %(run_id)s) AS num_groups, count(*) AS num_experiences,
       coalesce(sum(e.num_prompt_tokens + e.num_response_tokens), 0)::bigint AS num_tokens
FROM rft.rollout_group g JOIN rft.experience e USING (group_id) WHERE g.run_id = %(run_id)s;

-- name: borrowed_segments (read)
-- Segments of a run's experiences that another run wrote: the experiences are copies, made by a fork.
SELECT DISTINCT e.segment_id FROM rft.rollout_group g JOIN rft.experience e USING (group_id)
JOIN rft.experience p ON p.experience_id = e.parent_id AND p.run_id <> e.run_id AND p.segment_id = e.segment_id AND p.segment_row = e.segment_row
WHERE g.run_id = %(run_id)s;

-- name: archived_lenders (read)
-- Archived runs with whose arrays the experiences of a run were stored.
SELECT DISTINCT r.name FROM rft.rollout_group g JOIN rft.experience e USING (group_id)
JOIN rft.archived_segment s USING (segment_id) JOIN rft.run r ON r.run_id = s.run_id
WHERE g.run_id = %(run_id)s AND s.run_id <> %(run_id)s ORDER BY 1;

-- name: lock_archived_rows
-- Lock a run's experiences, as a relabel does, then its groups with their reviews.
SELECT count(*) AS num_locked, rft.lock_groups_and_reviews(ARRAY(SELECT group_id FROM rft.rollout_group WHERE run_id = %(run_id)s ORDER BY group_id))
FROM (SELECT FROM rft.experience WHERE group_id IN (SELECT group_id FROM rft.rollout_group WHERE run_id = %(run_id)s)
      ORDER BY experience_id FOR UPDATE) e;

-- name: end_claims_of_run
-- Release what processes hold of a run: what they write under an earlier claim is refused.
WITH groups AS (
    UPDATE rft.rollout_group SET status = 'planned', claimed_by = NULL, lease_until = NULL, claim_token = claim_token + 1
    WHERE run_id = %(run_id)s AND status = 'claimed'),
items AS (
    UPDATE rft.worklist SET available = true, claimed_by = NULL, lease_until = NULL
    WHERE run_id = %(run_id)s::bigint AND consumer = 'pipeline' AND NOT available)
UPDATE rft.evaluation SET status = 'planned', claimed_by = NULL, lease_until = NULL WHERE run_id = %(run_id)s AND status = 'claimed';

-- name: limit_archive_wait
-- Let the current transaction not wait longer than a few seconds for a lock, since others wait behind it.
SELECT set_config('lock_timeout', '5s', true);

-- name: await_inserts
-- Wait for transactions that have inserted rows of any run, and let others wait, until the current transaction ends.
LOCK TABLE rft.archive IN EXCLUSIVE MODE;

-- name: rows_of_archive (read)
-- Numbers of the rows whose content an archive holds. Rows that are inserted while the content is moved change them.
SELECT (SELECT count(*) FROM rft.experience e WHERE e.group_id = ANY (g.ids)) AS experiences,
       (SELECT count(*) FROM rft.group_prompt p WHERE p.group_id = ANY (g.ids)) AS prompts,
       (SELECT count(*) FROM rft.group_baseline b WHERE b.group_id = ANY (g.ids)) AS baselines,
       (SELECT count(*) FROM rft.experience e JOIN rft.score s USING (experience_id) WHERE e.group_id = ANY (g.ids)) AS scores,
       (SELECT count(*) FROM rft.worklist w
        WHERE w.run_id = %(run_id)s) AS items,
       cardinality(g.ids) AS groups
FROM (SELECT ARRAY(SELECT group_id FROM rft.rollout_group WHERE run_id = %(run_id)s) AS ids) g;

-- name: allow_archive_changes
-- Allow the owner to change facts in this transaction.
SELECT set_config('rft.purge', 'archive', true);

-- name: empty_experiences
-- Empty what the archive holds of a run's experiences.
UPDATE rft.experience SET response = %(marker)s, response_messages = NULL, reward_parts = '{}', metrics = '{}'
WHERE group_id IN (SELECT group_id FROM rft.rollout_group WHERE run_id = %(run_id)s);

-- name: empty_prompts
-- Empty what the archive holds of a run's prompts.
UPDATE rft.group_prompt SET prompt = %(marker)s, messages = NULL
WHERE group_id IN (SELECT group_id FROM rft.rollout_group WHERE run_id = %(run_id)s);

-- name: empty_baselines
-- Empty what the archive holds of a run's baselines.
UPDATE rft.group_baseline SET response = %(marker)s, messages = NULL, reward_parts = '{}'
WHERE group_id IN (SELECT group_id FROM rft.rollout_group WHERE run_id = %(run_id)s);

-- name: delete_archived_scores
-- Delete the scores of a run, which its archive holds.
DELETE FROM rft.score s USING rft.experience e, rft.rollout_group g
WHERE s.experience_id = e.experience_id AND e.group_id = g.group_id AND g.run_id = %(run_id)s;

-- name: delete_archived_work
-- Delete a run's items of worklists, which its archive holds.
DELETE FROM rft.worklist
WHERE run_id = %(run_id)s;

-- name: move_segments_to_archive
-- Let an archive take the place of segments that still are as they were verified.
WITH gone AS (
    DELETE FROM rft.segment s USING unnest(%(segment_ids)s::bigint[], %(checksums)s::text[]) AS v (segment_id, checksum)
    WHERE s.segment_id = v.segment_id AND s.checksum = v.checksum
    RETURNING s.segment_id, s.length_bytes, s.num_rows, s.checksum, s.first_checksum, s.created_at)
INSERT INTO rft.archived_segment (segment_id, run_id, length_bytes, num_rows, checksum, first_checksum, created_at)
SELECT segment_id, %(run_id)s, length_bytes, num_rows, checksum, first_checksum, created_at FROM gone;

-- name: insert_archive_file
-- Record a file of an archive.
INSERT INTO rft.archive_file (run_id, path, table_name, num_rows, num_bytes, checksum)
VALUES (%(run_id)s, %(path)s, %(table_name)s, %(num_rows)s, %(num_bytes)s, %(checksum)s);

-- name: finish_archive
-- Record that a run is archived, also for transactions whose snapshot is older.
WITH marked AS (UPDATE rft.buffer SET archived_at = clock_timestamp())
UPDATE rft.archive SET status = 'archived', archived_at = clock_timestamp(), num_groups = %(num_groups)s, num_experiences = %(num_experiences)s,
    num_tokens = %(num_tokens)s,
    array_bytes = (SELECT coalesce(sum(length_bytes), 0) FROM rft.archived_segment WHERE run_id = %(run_id)s)
WHERE run_id = %(run_id)s AND status = 'writing' AND started_at = %(started_at)s;

-- name: segments_of_archive (read)
-- The segments that an archive holds.
SELECT segment_id, length_bytes, num_rows, checksum, first_checksum, created_at FROM rft.archived_segment WHERE run_id = %(run_id)s ORDER BY segment_id;

-- name: finish_restoration
-- Record that all rows of an archived run are whole again, before they are.
UPDATE rft.archive SET status = 'restored' WHERE run_id = %(run_id)s AND status = 'archived';

-- name: stage_experiences
-- The table into which the texts of archived experiences are loaded.
CREATE TEMPORARY TABLE archived_experience ON COMMIT DROP AS
SELECT experience_id, response, response_messages, reward_parts, metrics FROM rft.experience WITH NO DATA;

-- name: stage_prompts
-- The table into which archived prompts are loaded.
CREATE TEMPORARY TABLE archived_group_prompt ON COMMIT DROP AS
SELECT group_id, prompt_digest, prompt, messages FROM rft.group_prompt WITH NO DATA;

-- name: stage_baselines
-- The table into which archived baselines are loaded.
CREATE TEMPORARY TABLE archived_group_baseline ON COMMIT DROP AS
SELECT group_id, response, messages, reward_parts FROM rft.group_baseline WITH NO DATA;

-- name: refill_experiences
-- Write the loaded texts back into experiences.
UPDATE rft.experience e SET response = a.response, response_messages = a.response_messages, reward_parts = a.reward_parts, metrics = a.metrics
FROM archived_experience a WHERE e.experience_id = a.experience_id;

-- name: refill_prompts
-- Write the loaded prompts back.
UPDATE rft.group_prompt p SET prompt = a.prompt, messages = a.messages
FROM archived_group_prompt a WHERE p.group_id = a.group_id AND p.prompt_digest = a.prompt_digest;

-- name: refill_baselines
-- Write the loaded baselines back.
UPDATE rft.group_baseline b SET response = a.response, messages = a.messages, reward_parts = a.reward_parts
FROM archived_group_baseline a WHERE b.group_id = a.group_id;

-- name: restore_segments
-- Insert the rows of archived segments again, with the addresses to which their bytes were written. A checksum that differs from the archived one
-- becomes that of bytes that were written again.
INSERT INTO rft.segment (segment_id, file_id, offset_bytes, length_bytes, num_rows, checksum, first_checksum, created_at)
SELECT s.segment_id, f.file_id, m.offset_bytes, m.length_bytes, s.num_rows, m.checksum,
       CASE WHEN m.checksum = s.checksum THEN s.first_checksum ELSE coalesce(s.first_checksum, s.checksum) END, s.created_at
FROM unnest(%(segment_ids)s::bigint[], %(uris)s::text[], %(offsets)s::bigint[], %(lengths)s::bigint[], %(checksums)s::text[])
    AS m (segment_id, uri, offset_bytes, length_bytes, checksum)
JOIN rft.archived_segment s USING (segment_id) JOIN rft.segment_file f ON f.uri = m.uri;

-- name: forget_archived_segments
-- Delete the segments of an archive, whose rows are in rft.segment again.
DELETE FROM rft.archived_segment WHERE run_id = %(run_id)s;

-- name: forget_archive_files
-- Delete the list of an archive's files.
DELETE FROM rft.archive_file WHERE run_id = %(run_id)s;

-- name: forget_archive
-- Delete the record of an archive whose files are gone.
DELETE FROM rft.archive WHERE run_id = %(run_id)s AND status <> 'archived';
