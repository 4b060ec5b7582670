-- Annotations that chains read count for their verdicts as labels do.

CREATE FUNCTION rft.newest_read_annotation(of_group bigint, of_pipeline text, only_reopening boolean DEFAULT true) RETURNS bigint
LANGUAGE sql STABLE
AS $$
    SELECT max(a.annotation_id)
    FROM rft.pipeline p JOIN rft.annotation a ON a.group_id = of_group AND a.kind = ANY (p.label_kinds)
    WHERE p.pipeline_version = of_pipeline AND p.label_kinds <> '{}'
      AND (NOT only_reopening OR (SELECT k.reopens FROM rft.label_kind k WHERE k.kind = a.kind AND k.version = a.kind_version))
$$;
COMMENT ON FUNCTION rft.newest_read_annotation(bigint, text, boolean) IS 'Returns the newest annotation of a group, standing or not, that a pipeline version reads: of all kinds, or only of those that reopen; NULL if there is none. A verdict with an older label_cut is out of date.';

-- As before, and a verdict does not count for an experience about which an annotation arrived since that the chain reads.
CREATE OR REPLACE VIEW rft.v_left_out AS
SELECT v.experience_id, v.group_id, g.run_id, v.stage, rft.general_reason(v.reason) AS reason
FROM rft.verdict v
JOIN rft.rollout_group g ON g.group_id = v.group_id AND g.decided_by = v.newest_of
WHERE NOT v.kept
  AND NOT EXISTS (SELECT FROM rft.label l WHERE l.experience_id = v.experience_id AND l.label_id > v.label_cut)
  AND coalesce(rft.newest_read_annotation(v.group_id, v.newest_of) <= v.label_cut, true)
  AND NOT (g.status = 'sealed' AND NOT EXISTS (
      SELECT FROM rft.verdict o WHERE o.group_id = v.group_id AND o.newest_of = v.newest_of AND o.stage IS DISTINCT FROM v.stage));
COMMENT ON VIEW rft.v_left_out IS 'Experiences that the chain of their run dropped, with the stage and the reason (without ids of rows): what pairs and stored selections leave out by default. Without those that were corrected since, and without those of groups with a newer label that the chain reads.';
