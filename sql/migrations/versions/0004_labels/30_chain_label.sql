-- Annotations that chains read count for their verdicts as labels do.

CREATE FUNCTION rft.newest_read_annotation(of_group bigint, of_pipeline text, only_reopening boolean DEFAULT true) RETURNS bigint
LANGUAGE sql STABLE
AS $$
    SELECT max(a.annotation_id)
    FROM rft.pipeline p JOIN rft.annotation a ON a.group_id = of_group AND a.kind = ANY (p.label_kinds)
    WHERE p.pipeline_version = of_pipeline AND p.label_kinds <> '{}'
      AND (NOT only_reopening OR a.source NOT IN ('judge', 'rule') AND (SELECT k.reopens FROM rft.label_kind k WHERE k.kind = a.kind AND k.version = a.kind_version))
$$;
COMMENT ON FUNCTION rft.newest_read_annotation(bigint, text, boolean) IS 'Returns the newest annotation of a group, standing or not, that a pipeline version reads: any, or only those that reopen; NULL if there is none. A verdict with an older label_cut is out of date.';
