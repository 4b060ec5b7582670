-- A purge removes the texts of annotations. Numbers, choices and rankings stay, as all numbers do. See docs/decisions/0045.

CREATE FUNCTION rft.without_texts(of_type rft.label_type, spec jsonb, value jsonb) RETURNS jsonb
LANGUAGE sql IMMUTABLE
AS $$
    SELECT CASE of_type
        WHEN 'text' THEN to_jsonb('[purged]'::text)
        WHEN 'edit' THEN jsonb_build_object('response', '[purged]')
        WHEN 'spans' THEN (SELECT coalesce(jsonb_agg(s - 'note'), '[]') FROM jsonb_array_elements(value) s)
        WHEN 'tags' THEN (SELECT coalesce(jsonb_agg(CASE WHEN spec -> 'tags' @> t THEN t ELSE to_jsonb('[purged]'::text) END), '[]') FROM jsonb_array_elements(value) t)
        ELSE value END
$$;
COMMENT ON FUNCTION rft.without_texts(rft.label_type, jsonb, jsonb) IS 'Returns the value of an annotation without what its author wrote. Words from the list of the kind stay.';

-- What is about purged texts is emptied, superseded annotations too. A judge may have compared all answers of a group; a person's annotations of the
-- other experiences stay.
CREATE FUNCTION rft.purge_annotations(groups bigint[], of_tasks bigint[]) RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
    UPDATE rft.annotation a
    SET value = rft.without_texts(a.type, k.spec, a.value), reason = CASE WHEN a.reason IS NOT NULL THEN '[purged]' END, shown = NULL
    FROM rft.label_kind k
    WHERE k.kind = a.kind AND k.version = a.kind_version AND a.annotation_id = ANY (ARRAY(
        SELECT n.annotation_id FROM rft.annotation n JOIN rft.label_kind v ON v.kind = n.kind AND v.version = n.kind_version
        WHERE n.group_id = ANY (groups) AND (
            v.target <> 'experience' OR n.source IN ('judge', 'rule') OR EXISTS (SELECT FROM rft.purged_experience x WHERE x.experience_id = n.target_id))
        UNION
        SELECT n.annotation_id FROM rft.annotation n JOIN rft.label_kind v ON v.kind = n.kind AND v.version = n.kind_version
        WHERE n.target_id = ANY (of_tasks) AND v.target = 'task'
        UNION  -- of groups without an experience that was not purged
        SELECT n.annotation_id FROM rft.rollout_group g JOIN rft.annotation n ON n.group_id = g.group_id
        WHERE g.task_id = ANY (of_tasks) AND NOT EXISTS (
            SELECT FROM rft.experience e WHERE e.group_id = g.group_id AND NOT EXISTS (SELECT FROM rft.purged_experience x WHERE x.experience_id = e.experience_id))));
END
$$;
COMMENT ON FUNCTION rft.purge_annotations(bigint[], bigint[]) IS 'Removes the texts of annotations about purged experiences, their rollouts and groups, and about purged tasks.';

-- These errors name no experience, so all are removed that may quote one. Work that fails later finds the purge by was_purged_since.
CREATE OR REPLACE FUNCTION rft.purge_errors(groups bigint[], of_tasks bigint[], of_purge bigint) RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    runs bigint[] := ARRAY(SELECT DISTINCT run_id FROM rft.rollout_group WHERE group_id = ANY (groups) OR task_id = ANY (of_tasks));
    sets text[] := ARRAY(SELECT DISTINCT taskset FROM rft.task WHERE task_id = ANY (of_tasks));
BEGIN
    PERFORM rft.purge_annotations(groups, of_tasks);
    PERFORM rft.purge_comments(groups, of_tasks);
    UPDATE rft.operator_run o SET error = '[purged]'
    FROM (SELECT run_id, min(coalesce(sealed_at, planned_at)) AS since FROM rft.rollout_group WHERE group_id = ANY (groups) GROUP BY run_id) r
    WHERE o.run_id = r.run_id AND o.ran_at >= r.since AND o.error IS NOT NULL;
    UPDATE rft.operator_run SET error = '[purged]' WHERE error IS NOT NULL AND taskset = ANY (sets);

    UPDATE rft.purge p SET purged_at = clock_timestamp(),
        run_ids = ARRAY(SELECT DISTINCT i.id FROM unnest(p.run_ids || runs) i (id) ORDER BY 1),
        tasksets = ARRAY(SELECT DISTINCT i.name FROM unnest(p.tasksets || sets) i (name) ORDER BY 1)
    WHERE p.purge_id = of_purge AND p.kind = 'request';
    IF FOUND THEN
        PERFORM FROM rft.worker WHERE run_id = ANY (runs) ORDER BY worker_id FOR UPDATE;
        -- What a process waits for may quote an error after a colon.
        UPDATE rft.worker SET error = CASE WHEN error <> 'the process is gone' THEN '[purged]' ELSE error END, waiting_for = split_part(waiting_for, ': ', 1)
        WHERE run_id = ANY (runs) AND (error <> 'the process is gone' OR waiting_for LIKE '%: %');
        UPDATE rft.run SET outcome = '[purged]' WHERE run_id = ANY (runs) AND status = 'failed' AND outcome IS NOT NULL;
    END IF;
END
$$;
COMMENT ON FUNCTION rft.purge_errors(bigint[], bigint[], bigint) IS 'Removes errors of stages, and for a request those of processes, that may quote texts of groups or tasks; records the runs and tasksets for errors to come.';

-- A condition may ask for the number of labels, which a label of a turn changes without the experience's row, and for annotations.
CREATE OR REPLACE FUNCTION rft.version_of_experience(e rft.experience) RETURNS text
LANGUAGE sql STABLE
AS $$
    SELECT concat_ws(' ', (SELECT x.xmin FROM rft.experience x WHERE x.experience_id = e.experience_id),
        (SELECT max(l.label_id) FROM rft.label l WHERE l.experience_id = e.experience_id AND l.turn IS NOT NULL),
        (SELECT max(a.annotation_id) FROM rft.annotation a WHERE a.group_id = e.group_id))
$$;
COMMENT ON FUNCTION rft.version_of_experience IS 'Returns a text that changes with the row of an experience, with labels of its turns, and with annotations of its group.';
