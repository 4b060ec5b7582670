-- name: buffer_id (read)
-- The identity of this buffer.
SELECT buffer_id FROM rft.buffer;

-- name: segment_addresses (read)
-- The current addresses of segments.
SELECT s.segment_id, f.uri, s.offset_bytes, s.length_bytes, s.checksum
FROM rft.segment s JOIN rft.segment_file f USING (file_id) WHERE s.segment_id = ANY (%(segment_ids)s);

-- name: all_segments (read)
-- All segments with their current addresses.
SELECT s.segment_id, f.uri, s.offset_bytes, s.length_bytes, s.num_rows, s.checksum
FROM rft.segment s JOIN rft.segment_file f USING (file_id) ORDER BY s.segment_id;

-- name: dangling_references (read)
-- Experiences whose arrays are in no segment, of the database or of an archive.
SELECT e.experience_id, e.segment_id, e.segment_row FROM rft.experience e LEFT JOIN rft.segment s USING (segment_id)
LEFT JOIN rft.archived_segment a USING (segment_id)
WHERE (s.segment_id IS NULL OR e.segment_row >= s.num_rows) AND (a.segment_id IS NULL OR e.segment_row >= a.num_rows) ORDER BY e.experience_id LIMIT 1000;

-- name: wrong_annotations (read)
-- Annotations whose target does not exist or is of another group, and chains in which an annotation stands beside the one that supersedes it.
SELECT a.annotation_id, k.target::text AS target, a.target_id
FROM rft.annotation a
LEFT JOIN rft.label_kind k ON k.kind = a.kind AND k.version = a.kind_version
LEFT JOIN rft.experience e ON k.target = 'experience' AND e.experience_id = a.target_id
LEFT JOIN rft.rollout o ON k.target = 'rollout' AND o.rollout_id = a.target_id
LEFT JOIN rft.task t ON k.target = 'task' AND t.task_id = a.target_id
LEFT JOIN rft.annotation s ON s.annotation_id = a.supersedes
WHERE k.kind IS NULL OR k.type <> a.type
   OR CASE k.target WHEN 'task' THEN t.task_id IS NULL OR a.group_id IS NOT NULL
                    ELSE a.group_id IS DISTINCT FROM CASE k.target WHEN 'experience' THEN e.group_id WHEN 'rollout' THEN o.group_id ELSE a.target_id END END
   OR s.annotation_id IS NOT NULL AND (s.kind, s.target_id, s.author, s.session_user_name, s.source) IS DISTINCT FROM (a.kind, a.target_id, a.author, a.session_user_name, a.source)
ORDER BY a.annotation_id LIMIT 1000;

-- name: wrong_comments (read)
-- Comments whose target does not exist or is of another group.
SELECT c.comment_id, c.target::text AS target, c.target_id
FROM rft.comment c
LEFT JOIN rft.experience e ON c.target = 'experience' AND e.experience_id = c.target_id
LEFT JOIN rft.rollout o ON c.target = 'rollout' AND o.rollout_id = c.target_id
LEFT JOIN rft.task t ON c.target = 'task' AND t.task_id = c.target_id
WHERE CASE c.target WHEN 'task' THEN t.task_id IS NULL OR c.group_id IS NOT NULL
                    ELSE c.group_id IS DISTINCT FROM CASE c.target WHEN 'experience' THEN e.group_id WHEN 'rollout' THEN o.group_id ELSE c.target_id END END
ORDER BY c.comment_id LIMIT 1000;

-- name: experiences_of_segments (read)
-- Experiences of segments. It scans the table, so it is used only for segments that cannot be read.
SELECT segment_id, array_agg(experience_id ORDER BY experience_id) AS experience_ids FROM rft.experience
WHERE segment_id = ANY (%(segment_ids)s) GROUP BY segment_id;

-- name: misplaced_segments (read)
-- Segments whose address cannot be right, whatever the file contains.
SELECT s.segment_id, CASE WHEN f.file_id IS NULL THEN format('file %s, which is not in rft.segment_file', s.file_id)
                          WHEN f.retired_at IS NOT NULL THEN format('the file %s, which is retired', f.uri)
                          ELSE format('bytes beyond the committed length of %s', f.uri) END AS place
FROM rft.segment s LEFT JOIN rft.segment_file f USING (file_id)
WHERE f.file_id IS NULL OR f.retired_at IS NOT NULL OR s.offset_bytes + s.length_bytes > f.size_bytes ORDER BY s.segment_id;

-- name: any_purge (read)
-- Whether anything was ever purged.
SELECT EXISTS (SELECT FROM rft.purge) AS found;

-- name: segment_files (read)
-- Files that may still be on disk, with their live segments.
SELECT f.uri, f.size_bytes, f.closed_at IS NOT NULL AS closed,
       extract(epoch FROM clock_timestamp() - f.retired_at)::float8 AS retired_s,
       coalesce(s.live_bytes, 0) AS live_bytes, coalesce(s.num_segments, 0) AS num_segments
FROM rft.segment_file f
LEFT JOIN (SELECT file_id, sum(length_bytes)::bigint AS live_bytes, count(*) AS num_segments FROM rft.segment GROUP BY file_id) s
    USING (file_id)
WHERE f.removed_at IS NULL ORDER BY f.file_id;

-- name: unknown_files (read)
-- Of files found on disk: those that no committed row names, and those that were removed and are back.
SELECT u.uri, f.file_id IS NOT NULL AS was_removed FROM unnest(%(uris)s::text[]) AS u (uri) LEFT JOIN rft.segment_file f USING (uri)
WHERE f.file_id IS NULL OR f.removed_at IS NOT NULL ORDER BY u.uri;

-- name: close_files
-- Close files, so that no segment can be committed to them. Waits for writers that are committing one. Returns the final sizes.
UPDATE rft.segment_file SET closed_at = coalesce(closed_at, clock_timestamp()) WHERE uri = ANY (%(uris)s) RETURNING uri, size_bytes;

-- name: segments_of_file (read)
-- The segments that a file currently holds, in order.
SELECT s.segment_id, f.uri, s.offset_bytes, s.length_bytes, s.num_rows, s.checksum
FROM rft.segment_file f JOIN rft.segment s USING (file_id) WHERE f.uri = %(uri)s ORDER BY s.offset_bytes;

-- name: register_files
-- Register files that segments move to. Returns fewer rows than files if one of them is closed.
INSERT INTO rft.segment_file AS f (uri, size_bytes)
SELECT uri, max(size_bytes) FROM unnest(%(uris)s::text[], %(sizes)s::bigint[]) AS u (uri, size_bytes) GROUP BY uri ORDER BY uri
ON CONFLICT (uri) DO UPDATE SET size_bytes = greatest(f.size_bytes, excluded.size_bytes) WHERE f.closed_at IS NULL
RETURNING uri;

-- name: move_segments
-- Move segments, only from where the mover found them. If two processes move one segment, the first wins and the other's copy is discarded.
UPDATE rft.segment s
SET file_id = t.file_id, offset_bytes = m.to_offset, length_bytes = m.to_length, checksum = m.to_checksum
FROM unnest(%(segment_ids)s::bigint[], %(from_uris)s::text[], %(from_offsets)s::bigint[], %(to_uris)s::text[], %(to_offsets)s::bigint[],
            %(to_lengths)s::bigint[], %(to_checksums)s::text[])
         AS m (segment_id, from_uri, from_offset, to_uri, to_offset, to_length, to_checksum)
JOIN rft.segment_file f ON f.uri = m.from_uri
JOIN rft.segment_file t ON t.uri = m.to_uri
WHERE s.segment_id = m.segment_id AND s.file_id = f.file_id AND s.offset_bytes = m.from_offset
RETURNING s.segment_id;

-- name: retire_empty_files
-- Retire closed files without live segments. They are removed after a grace period.
UPDATE rft.segment_file f SET retired_at = clock_timestamp()
WHERE f.uri = ANY (%(uris)s) AND f.closed_at IS NOT NULL AND f.retired_at IS NULL
  AND NOT EXISTS (SELECT FROM rft.segment s WHERE s.file_id = f.file_id)
RETURNING f.uri;

-- name: bury_orphans
-- Close a file that no committed row names, before it is removed, so that a writer that is still running cannot commit to it. If a writer
-- is committing at this moment, this waits and leaves the file out.
INSERT INTO rft.segment_file (uri, size_bytes, closed_at, retired_at)
SELECT uri, 0, clock_timestamp(), clock_timestamp() FROM unnest(%(uris)s::text[]) AS u (uri)
ON CONFLICT (uri) DO NOTHING RETURNING uri;

-- name: forget_files
-- Record that files were removed. Their names stay, so that no writer can commit to them.
UPDATE rft.segment_file SET removed_at = clock_timestamp() WHERE uri = ANY (%(uris)s) AND retired_at IS NOT NULL;
