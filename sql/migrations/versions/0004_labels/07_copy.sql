-- Annotations of what is copied by a fork, or imported from a file. They keep author, account, source and time; their batches are new.
-- Only these functions, and the owner, give an annotation its id: then the trigger that checks and fills in is not called.

CREATE FUNCTION rft.ranking_here(value jsonb, of_group bigint) RETURNS jsonb
LANGUAGE sql STABLE
AS $$
    SELECT jsonb_build_object('order', coalesce(jsonb_agg(t.ids ORDER BY t.place), '[]'))
    FROM (
        SELECT o.place, jsonb_agg(h.experience_id ORDER BY i.place) AS ids
        FROM jsonb_array_elements(value -> 'order') WITH ORDINALITY AS o (tie, place)
        CROSS JOIN LATERAL jsonb_array_elements(o.tie) WITH ORDINALITY AS i (id, place)
        CROSS JOIN LATERAL (
            SELECT e.experience_id FROM rft.experience e LEFT JOIN rft.experience_origin x ON x.experience_id = e.experience_id
            WHERE e.group_id = of_group AND coalesce(x.origin_experience_id, e.parent_id) = i.id::bigint LIMIT 1) h
        GROUP BY o.place) t
$$;
COMMENT ON FUNCTION rft.ranking_here(jsonb, bigint) IS 'Returns a ranking of the origins of a group''s experiences as one of these. Origins without a copy are left out.';

-- Runs with the owner's rights, because no other role may write an annotation in the name of another account. What it writes is what stands about the
-- origins: a row counts as a copy only with the address of its parent's arrays. No setting of the caller is believed: the batch is a new one.
-- rft_worker may execute it, for forks.
CREATE FUNCTION rft.copy_annotations(of_groups bigint[]) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off SET enable_material = off SET enable_mergejoin = off
AS $$
DECLARE
    num_copied bigint;
BEGIN
    IF NOT EXISTS (SELECT FROM rft.annotation) AND NOT EXISTS (SELECT FROM rft.edited_response) THEN
        RETURN 0;
    END IF;
    PERFORM set_config('rft.label_batch', (SELECT b::text FROM rft.begin_label_batches(1) b), true);
    WITH copies AS MATERIALIZED (
        SELECT e.experience_id, e.rollout_id, e.group_id, p.experience_id AS from_experience, p.rollout_id AS from_rollout, p.group_id AS from_group
        FROM unnest(of_groups) AS g (group_id)
        CROSS JOIN LATERAL (SELECT * FROM rft.experience WHERE group_id = g.group_id OFFSET 0) e
        CROSS JOIN LATERAL (SELECT * FROM rft.experience WHERE experience_id = e.parent_id OFFSET 0) p
        WHERE p.segment_id = e.segment_id AND p.segment_row = e.segment_row),
    places AS (
        SELECT 'experience'::rft.label_target AS target, from_experience AS from_id, experience_id AS to_id, from_group, group_id FROM copies
        UNION SELECT 'rollout', from_rollout, rollout_id, from_group, group_id FROM copies
        UNION SELECT 'group', from_group, group_id, from_group, group_id FROM copies),
    found AS (
        SELECT a.*, p.to_id, p.group_id AS to_group
        FROM places p
        CROSS JOIN LATERAL (SELECT * FROM rft.annotation WHERE group_id = p.from_group AND target_id = p.from_id OFFSET 0) a
        CROSS JOIN LATERAL (SELECT target FROM rft.label_kind WHERE kind = a.kind AND version = a.kind_version OFFSET 0) k
        WHERE k.target = p.target AND NOT a.retracted AND NOT EXISTS (SELECT FROM rft.annotation s WHERE s.supersedes = a.annotation_id))
    INSERT INTO rft.annotation (annotation_id, kind, kind_version, type, target_id, group_id, value, source, author, session_user_name, model, confidence,
        reason, shown, seconds, label_batch_id, made_at)
    SELECT nextval('rft.label_label_id_seq'), f.kind, f.kind_version, f.type, f.to_id, f.to_group,
           CASE WHEN f.type = 'ranking' THEN rft.ranking_here(f.value, f.to_group) ELSE f.value END, f.source, f.author, f.session_user_name, f.model,
           f.confidence, f.reason, f.shown, f.seconds, current_setting('rft.label_batch')::bigint, f.made_at
    FROM found f ORDER BY f.annotation_id;
    GET DIAGNOSTICS num_copied = ROW_COUNT;
    PERFORM set_config('rft.label_batch', '', true);
    INSERT INTO rft.edited_response (experience_id, annotation_id, is_copy, origin)
    SELECT e.experience_id, x.annotation_id, true, x.origin
    FROM unnest(of_groups) AS g (group_id)
    CROSS JOIN LATERAL (SELECT * FROM rft.experience WHERE group_id = g.group_id OFFSET 0) e
    CROSS JOIN LATERAL (SELECT * FROM rft.experience WHERE experience_id = e.parent_id OFFSET 0) p
    CROSS JOIN LATERAL (SELECT * FROM rft.edited_response WHERE experience_id = p.experience_id OFFSET 0) x
    WHERE p.segment_id = e.segment_id AND p.segment_row = e.segment_row;
    RETURN num_copied;
END
$$;
COMMENT ON FUNCTION rft.copy_annotations(bigint[]) IS 'Copies what stands about the origins of a fork''s groups, and which of them render edits; returns the number of annotations. Owner''s rights, since the copies keep their accounts.';

CREATE VIEW rft.v_annotation_in_file WITH (security_invoker = true) AS
SELECT e.experience_id, a.kind, a.type, k.target, k.spec, k.level, k.blind, k.reopens, k.instruction, a.value, a.source, a.author, a.session_user_name,
       a.model, a.confidence, a.reason, a.shown, a.seconds, a.label_batch_id, a.made_at
FROM rft.annotation a
JOIN rft.label_kind k ON k.kind = a.kind AND k.version = a.kind_version
JOIN rft.experience e ON e.group_id = a.group_id AND CASE k.target
    WHEN 'experience' THEN e.experience_id = a.target_id
    WHEN 'rollout' THEN e.experience_id = (SELECT min(f.experience_id) FROM rft.experience f WHERE f.group_id = a.group_id AND f.rollout_id = a.target_id)
    ELSE e.experience_id = (SELECT min(f.experience_id) FROM rft.experience f WHERE f.group_id = a.group_id) END
WHERE NOT a.retracted AND NOT EXISTS (SELECT FROM rft.annotation s WHERE s.supersedes = a.annotation_id);
COMMENT ON VIEW rft.v_annotation_in_file IS 'Annotations that stand as files of experiences have them: with the definitions of their kinds, those about a rollout or a group with its first experience.';

CREATE FUNCTION rft.check_imported_annotations(given jsonb) RETURNS void
LANGUAGE plpgsql STABLE
AS $$
DECLARE
    a jsonb;
    problem text;
BEGIN
    FOR a IN SELECT e FROM jsonb_array_elements(given) e LOOP
        problem := CASE
            WHEN jsonb_typeof(a) <> 'object' OR NOT a ?& ARRAY['kind', 'type', 'target', 'spec', 'value', 'source', 'author', 'session_user_name', 'made_at', 'label_batch_id']
                THEN 'it must have kind, type, target, spec, value, source, author, session_user_name, label_batch_id and made_at'
            ELSE coalesce('the specification ' || rft.why_wrong_spec((a ->> 'type')::rft.label_type, a -> 'spec'),
                          'the value ' || rft.why_wrong_value((a ->> 'type')::rft.label_type, a -> 'spec', a -> 'value'),
                          rft.why_too_large(jsonb_populate_record(NULL::rft.annotation, a - 'key'))) END;
        IF problem IS NULL THEN  -- what the table would refuse later
            PERFORM (a ->> 'source')::rft.annotation_source, (a ->> 'target')::rft.label_target, (a ->> 'label_batch_id')::bigint, (a ->> 'made_at')::timestamptz,
                (a ->> 'level')::rft.label_level, (a ->> 'blind')::boolean, (a ->> 'reopens')::boolean;
            problem := CASE WHEN NOT coalesce((a ->> 'confidence')::double precision BETWEEN 0 AND 1, true) THEN 'the confidence must be from 0 to 1'
                WHEN NOT coalesce((a ->> 'seconds')::double precision BETWEEN 0 AND 1e9, true) THEN 'seconds must be 0 or more'
                WHEN coalesce(a ->> 'author', '') = '' THEN 'the author is empty' END;
        END IF;
        IF problem IS NOT NULL THEN
            RAISE EXCEPTION 'an annotation of the kind %: %', left(a ->> 'kind', 100), problem
                USING ERRCODE = 'invalid_parameter_value', DETAIL = left(a::text, 500), HINT = 'Correct the file; nothing was imported.';
        END IF;
    END LOOP;
END
$$;
COMMENT ON FUNCTION rft.check_imported_annotations(jsonb) IS 'Refuses annotations of a file that cannot be stored.';

-- Runs with its caller's rights, who must be the owner: only the owner writes annotations in the name of others.
CREATE FUNCTION rft.import_annotations(given jsonb) RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    d record;
    found_version integer;
BEGIN
    FOR d IN SELECT DISTINCT i.kind, i.type, i.target, i.spec, i.level, coalesce(i.blind, false) AS blind, coalesce(i.reopens, false) AS reopens,
                    coalesce(i.instruction, '') AS instruction FROM jsonb_populate_recordset(NULL::rft.v_annotation_in_file, given) i LOOP
        found_version := (SELECT max(k.version) FROM rft.label_kind k
            WHERE (k.kind, k.type, k.target, k.spec, k.level, k.blind, k.reopens, k.instruction)
                = (d.kind, d.type, d.target, d.spec, d.level, d.blind, d.reopens, d.instruction));
        IF found_version IS NULL THEN
            INSERT INTO rft.label_kind (kind, type, target, spec, level, blind, reopens, instruction)
            VALUES (d.kind, d.type, d.target, d.spec, d.level, d.blind, d.reopens, d.instruction) RETURNING version INTO found_version;
            -- People go on with the version that they have.
            UPDATE rft.label_kind SET retired_at = clock_timestamp() WHERE kind = d.kind AND version = found_version AND version > 1;
        END IF;
    END LOOP;
    PERFORM set_config('rft.label_batch', (SELECT min(i.label_batch_id)::text FROM jsonb_populate_recordset(NULL::rft.v_annotation_in_file, given) i), true);
    INSERT INTO rft.annotation (annotation_id, kind, kind_version, type, target_id, group_id, value, source, author, session_user_name, model, confidence,
        reason, shown, seconds, label_batch_id, made_at)
    SELECT nextval('rft.label_label_id_seq'), i.kind, k.version, i.type,
           CASE i.target WHEN 'experience' THEN e.experience_id WHEN 'rollout' THEN e.rollout_id ELSE e.group_id END, e.group_id, h.value, i.source, i.author,
           i.session_user_name, i.model, i.confidence, i.reason, i.shown, i.seconds, i.label_batch_id, i.made_at
    FROM jsonb_populate_recordset(NULL::rft.v_annotation_in_file, given) i
    CROSS JOIN LATERAL (SELECT * FROM rft.experience WHERE experience_id = i.experience_id OFFSET 0) e
    CROSS JOIN LATERAL (
        SELECT max(v.version) AS version FROM rft.label_kind v
        WHERE (v.kind, v.type, v.target, v.spec, v.level, v.blind, v.reopens, v.instruction)
            = (i.kind, i.type, i.target, i.spec, i.level, coalesce(i.blind, false), coalesce(i.reopens, false), coalesce(i.instruction, ''))) k
    CROSS JOIN LATERAL (SELECT CASE WHEN i.type = 'ranking' THEN rft.ranking_here(i.value, e.group_id) ELSE i.value END AS value) h
    WHERE i.type <> 'ranking' OR rft.why_wrong_ranking(h.value) IS NULL;  -- of a group that is here in part, less than two may be left
    PERFORM set_config('rft.label_batch', '', true);
END
$$;
COMMENT ON FUNCTION rft.import_annotations(jsonb) IS 'Stores annotations of a file about experiences that are stored already, their rollouts and groups. Defines kinds that are unknown; where another definition is in use, as a retired version.';
