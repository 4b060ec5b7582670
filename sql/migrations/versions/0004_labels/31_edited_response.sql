-- Edited responses as experiences: which experience renders which edit, and whether it still counts.

CREATE TABLE rft.edited_response (
    experience_id bigint PRIMARY KEY,
    annotation_id bigint,
    is_copy boolean NOT NULL DEFAULT false,
    origin jsonb,
    CHECK (annotation_id IS NOT NULL OR (is_copy AND origin IS NOT NULL))
);
CREATE UNIQUE INDEX edited_response_once ON rft.edited_response (annotation_id) WHERE NOT is_copy;
CREATE INDEX edited_response_annotation ON rft.edited_response (annotation_id, experience_id);
COMMENT ON TABLE rft.edited_response IS 'An experience that renders an edit: a child of the experience that was edited. Written with the experience; an edit is rendered once, and forks and imports copy renderings.';
COMMENT ON COLUMN rft.edited_response.experience_id IS 'The child.';
COMMENT ON COLUMN rft.edited_response.annotation_id IS 'The edit, an annotation of the type edit; NULL if it is not in this buffer.';
COMMENT ON COLUMN rft.edited_response.is_copy IS 'Whether a fork or an import copied the experience.';
COMMENT ON COLUMN rft.edited_response.origin IS 'Of an import, the edit in the other buffer: buffer_id, parent_id, kind, source, author, session_user_name, made_at, and stands, whether it stood when it was exported. NULL otherwise.';
CREATE TRIGGER archived_edited_response_insert AFTER INSERT ON rft.edited_response REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_archived_change('experience_id');
CREATE INDEX annotation_restores ON rft.annotation (restores) WHERE restores IS NOT NULL;

CREATE FUNCTION rft.edit_stands(of_annotation bigint) RETURNS boolean
LANGUAGE sql STABLE
AS $$
    SELECT EXISTS (
        SELECT FROM rft.annotation a
        WHERE (a.annotation_id = of_annotation OR a.restores = of_annotation) AND NOT a.retracted
          AND NOT EXISTS (SELECT FROM rft.annotation s WHERE s.supersedes = a.annotation_id))
$$;
COMMENT ON FUNCTION rft.edit_stands(bigint) IS 'Returns whether an edit stands, by itself or because an undo restored it.';

CREATE VIEW rft.v_edit WITH (security_invoker = true) AS
SELECT coalesce(a.restores, a.annotation_id) AS annotation_id, a.kind, a.run_id, a.run, a.target_id AS parent_id, x.experience_id,
       a.value ->> 'response' AS response, a.source, a.author, a.session_user_name, a.made_at
FROM rft.v_annotation a
LEFT JOIN LATERAL (
    SELECT r.experience_id FROM rft.edited_response r WHERE r.annotation_id = coalesce(a.restores, a.annotation_id)
    ORDER BY r.is_copy, r.experience_id LIMIT 1) x ON true
WHERE a.type = 'edit' AND a.source NOT IN ('judge', 'rule');
COMMENT ON VIEW rft.v_edit IS 'Edits by people that stand, with the experience that renders each; NULL until `rft label edits` has rendered it.';

-- As before. A verdict does not count either for the experiences of a group about which an annotation arrived since that the chain reads. An
-- experience that renders an edit is left out once the edit no longer stands.
CREATE OR REPLACE VIEW rft.v_left_out AS
SELECT v.experience_id, v.group_id, g.run_id, v.stage, rft.general_reason(v.reason) AS reason
FROM rft.verdict v
JOIN rft.rollout_group g ON g.group_id = v.group_id AND g.decided_by = v.newest_of
WHERE NOT v.kept
  AND NOT EXISTS (SELECT FROM rft.label l WHERE l.experience_id = v.experience_id AND l.label_id > v.label_cut)
  AND coalesce(rft.newest_read_annotation(v.group_id, v.newest_of) <= v.label_cut, true)
  AND NOT (g.status = 'sealed' AND NOT EXISTS (
      SELECT FROM rft.verdict o WHERE o.group_id = v.group_id AND o.newest_of = v.newest_of AND o.stage IS DISTINCT FROM v.stage))
UNION ALL
SELECT x.experience_id, e.group_id, e.run_id, 'edit', 'the edit was superseded or undone'
FROM rft.edited_response x JOIN rft.experience e USING (experience_id)
WHERE NOT CASE WHEN x.annotation_id IS NULL THEN (x.origin ->> 'stands')::boolean ELSE rft.edit_stands(x.annotation_id) END;
COMMENT ON VIEW rft.v_left_out IS 'Experiences that the chain of their run dropped, with the stage and the reason (without ids of rows), and renderings of edits that no longer stand: what pairs and stored selections leave out by default. Without those that were corrected since, and without those of groups with a newer label that the chain reads.';

-- Runs with its caller's rights, who must be the owner. The edit came with its experience, perhaps in another file.
CREATE FUNCTION rft.link_imported_edits() RETURNS bigint
LANGUAGE plpgsql
AS $$
DECLARE
    num_linked bigint;
BEGIN
    UPDATE rft.edited_response r SET annotation_id = (
        SELECT a.annotation_id
        FROM rft.experience_origin o
        JOIN rft.experience e ON e.experience_id = o.experience_id
        JOIN rft.group_origin g ON g.group_id = e.group_id
        JOIN rft.annotation a ON a.target_id = e.experience_id AND a.kind = r.origin ->> 'kind'
        WHERE o.origin_experience_id = (r.origin ->> 'parent_id')::bigint AND g.buffer_id = (r.origin ->> 'buffer_id')::uuid
          AND a.type = 'edit' AND a.restores IS NULL AND NOT a.retracted
          AND (a.source::text, a.author, a.session_user_name) = (r.origin ->> 'source', r.origin ->> 'author', r.origin ->> 'session_user_name')
          AND a.made_at = (r.origin ->> 'made_at')::timestamptz
        ORDER BY e.run_id = (SELECT c.run_id FROM rft.experience c WHERE c.experience_id = r.experience_id) DESC, a.annotation_id DESC LIMIT 1)
    WHERE r.annotation_id IS NULL AND (r.origin ->> 'stands')::boolean;
    GET DIAGNOSTICS num_linked = ROW_COUNT;
    RETURN num_linked;
END
$$;
COMMENT ON FUNCTION rft.link_imported_edits() IS 'Links imported renderings with the edits that were imported with their parents.';
