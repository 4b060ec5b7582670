-- What stands, and undoing it. Views of annotations have security_invoker, so that the row security of blind kinds holds in them.

CREATE VIEW rft.v_annotation WITH (security_invoker = true) AS
SELECT a.annotation_id, a.kind, a.kind_version, a.type, k.target, k.level, a.target_id, a.group_id, g.run_id, r.name AS run,
       a.value, a.num, a.choice, a.source, a.author, a.session_user_name, a.model, a.confidence, a.reason, a.shown, a.seconds,
       a.label_batch_id, a.supersedes, a.restores, a.made_at
FROM rft.annotation a
JOIN rft.label_kind k ON k.kind = a.kind AND k.version = a.kind_version
LEFT JOIN rft.rollout_group g ON g.group_id = a.group_id
LEFT JOIN rft.run r ON r.run_id = g.run_id
WHERE NOT a.retracted AND NOT EXISTS (SELECT FROM rft.annotation s WHERE s.supersedes = a.annotation_id);
COMMENT ON VIEW rft.v_annotation IS 'Annotations that stand: neither superseded nor undone. Those of several people about one target stand side by side. Of a blind kind an account sees those of others only after its own.';

-- Runs with the owner's rights, because labellers may lock no rows but those whose reward they may set. It locks and does nothing else, in one order,
-- so that batches of annotations wait for each other instead of deadlocking. No setting is read. rft_labeler and rft_worker may execute it.
CREATE FUNCTION rft.lock_annotations(kinds text[], target_ids bigint[]) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off SET enable_material = off SET enable_mergejoin = off
AS $$
DECLARE
    -- The target of a kind is the same in all versions, and an undo may be about a retired one.
    places jsonb := (
        SELECT coalesce(jsonb_object_agg(t.target, t.ids), '{}')
        FROM (SELECT k.target, jsonb_agg(DISTINCT u.id) AS ids FROM unnest(kinds, target_ids) AS u (kind, id)
              JOIN (SELECT kind, min(target) AS target FROM rft.label_kind GROUP BY kind) k USING (kind) GROUP BY 1) t);
    experiences bigint[] := ARRAY(SELECT jsonb_array_elements(places -> 'experience')::bigint);
    rollouts bigint[] := ARRAY(SELECT jsonb_array_elements(places -> 'rollout')::bigint);
    tasks bigint[] := ARRAY(SELECT jsonb_array_elements(places -> 'task')::bigint);
    groups bigint[] := ARRAY(SELECT jsonb_array_elements(places -> 'group')::bigint);
BEGIN
    PERFORM FROM rft.experience WHERE experience_id = ANY (experiences) ORDER BY experience_id FOR NO KEY UPDATE;
    PERFORM FROM rft.rollout WHERE rollout_id = ANY (rollouts) ORDER BY rollout_id FOR NO KEY UPDATE;
    PERFORM FROM rft.task WHERE task_id = ANY (tasks) ORDER BY task_id FOR NO KEY UPDATE;
    groups := ARRAY(
        SELECT e.group_id FROM rft.experience e WHERE e.experience_id = ANY (experiences)
        UNION SELECT o.group_id FROM rft.rollout o WHERE o.rollout_id = ANY (rollouts)
        UNION SELECT unnest(groups));
    IF groups <> '{}' THEN
        PERFORM rft.lock_groups_and_reviews(groups);
    END IF;
END
$$;
COMMENT ON FUNCTION rft.lock_annotations(text[], bigint[]) IS 'Locks the targets of annotations, and their groups and reviews, before several annotations are written. Owner''s rights, to lock rows.';

-- These run with their caller's rights: they undo what the caller sees and may undo. Given rows of which each supersedes the one before are undone
-- together, if the last of them, or what it restored, is what stands; then what stood before the first of them stands again. Given rows before
-- a row that is not given were superseded by it.
CREATE FUNCTION rft.undo_annotation_rows(ids bigint[], why text)
RETURNS TABLE (undone_id bigint, annotation_id bigint, is_overruled boolean)
LANGUAGE plpgsql
    -- Lists of any length are joined by hashing, tables are looked up by key.
    SET enable_seqscan = off SET enable_material = off SET enable_mergejoin = off SET enable_hashjoin = on
AS $$
BEGIN
    RETURN QUERY
    WITH rows AS (
        SELECT a.*, a.supersedes IS DISTINCT FROM lag(a.annotation_id) OVER chain AS is_first, max(a.annotation_id) OVER of_chain AS chain_end
        FROM rft.annotation a WHERE a.annotation_id = ANY (ids)
        WINDOW of_chain AS (PARTITION BY a.kind, a.target_id, a.source, a.author, a.session_user_name), chain AS (of_chain ORDER BY a.annotation_id)),
    numbered AS (
        SELECT r.*, count(*) FILTER (WHERE r.is_first) OVER (PARTITION BY r.kind, r.target_id, r.source, r.author, r.session_user_name
                                                             ORDER BY r.annotation_id) AS part
        FROM rows r),
    given AS (
        SELECT n.kind, n.target_id, n.source, n.author, n.session_user_name, min(n.group_id) AS group_id, max(n.annotation_id) AS last_id,
               (array_agg(n.supersedes ORDER BY n.annotation_id))[1] AS before_id, max(n.annotation_id) = min(n.chain_end) AS is_end
        FROM numbered n GROUP BY n.kind, n.target_id, n.source, n.author, n.session_user_name, n.part),
    found AS (
        SELECT l.last_id AS undone_id, l.group_id, l.target_id, t.annotation_id AS tip_id, b.restored AS before_id,
               NOT l.is_end OR (t.annotation_id <> l.last_id AND t.restores IS DISTINCT FROM l.last_id) AS overruled
        FROM given l
        CROSS JOIN LATERAL (
            SELECT x.annotation_id, x.restores FROM (SELECT * FROM rft.annotation n WHERE n.target_id = l.target_id AND n.kind = l.kind OFFSET 0) x
            WHERE x.source = l.source AND x.author = l.author AND x.session_user_name = l.session_user_name
            ORDER BY x.annotation_id DESC LIMIT 1) t
        LEFT JOIN LATERAL (
            SELECT coalesce(x.restores, CASE WHEN NOT x.retracted THEN x.annotation_id END) AS restored
            FROM (SELECT * FROM rft.annotation n WHERE n.annotation_id = l.before_id OFFSET 0) x) b ON true),
    stored AS (
        INSERT INTO rft.annotation (supersedes, restores, retracted, reason)
        SELECT f.tip_id, f.before_id, f.before_id IS NULL, why FROM found f WHERE NOT f.overruled ORDER BY f.group_id, f.target_id
        RETURNING rft.annotation.annotation_id, rft.annotation.supersedes)
    -- FULL, which is LEFT here, because such a join is never planned as comparing each row with each.
    SELECT f.undone_id, s.annotation_id, f.overruled FROM (SELECT x.*, CASE WHEN NOT x.overruled THEN x.tip_id END AS supersedes FROM found x) f
    FULL JOIN stored s ON s.supersedes = f.supersedes ORDER BY f.undone_id;
END
$$;
COMMENT ON FUNCTION rft.undo_annotation_rows(bigint[], text) IS 'Undoes annotations, as a new batch: what stood before them stands again. Those that were superseded since are left and returned with is_overruled.';

CREATE FUNCTION rft.undo_annotations(of_batch bigint, why text DEFAULT NULL)
RETURNS TABLE (undone_id bigint, annotation_id bigint, is_overruled boolean)
LANGUAGE plpgsql
AS $$
BEGIN
    RETURN QUERY SELECT * FROM rft.undo_annotation_rows(
        ARRAY(SELECT a.annotation_id FROM rft.annotation a WHERE a.label_batch_id = of_batch), concat_ws(': ', format('undo of label batch %s', of_batch), why));
END
$$;
COMMENT ON FUNCTION rft.undo_annotations(bigint, text) IS 'Undoes the annotations of a batch, as rft.undo_annotation_rows does.';

CREATE FUNCTION rft.undo_annotation_of_key(of_key text, why text DEFAULT NULL)
RETURNS TABLE (undone_id bigint, annotation_id bigint, is_overruled boolean)
LANGUAGE plpgsql
AS $$
BEGIN
    RETURN QUERY SELECT * FROM rft.undo_annotation_rows(
        ARRAY(SELECT a.annotation_id FROM rft.annotation a WHERE a.session_user_name = session_user AND a.key = of_key), concat_ws(': ', 'undo', why));
END
$$;
COMMENT ON FUNCTION rft.undo_annotation_of_key(text, text) IS 'Undoes the annotation that this account stored under a key, as rft.undo_annotation_rows does; no row if there is none.';
