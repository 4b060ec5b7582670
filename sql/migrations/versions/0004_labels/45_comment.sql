-- Comments: what people write to each other about an experience, a rollout, a group or a task, or about labelling it with a kind. No chain reads them.

CREATE TABLE rft.comment (
    comment_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    target rft.label_target NOT NULL,
    target_id bigint NOT NULL,
    group_id bigint,
    kind text,
    comment text NOT NULL CHECK (comment <> '' AND octet_length(comment) <= 65536),
    author text NOT NULL CHECK (author <> '' AND octet_length(author) <= 200),
    session_user_name text NOT NULL,
    key text CHECK (key <> '' AND octet_length(key) <= 200),
    made_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX comment_target ON rft.comment (target_id, target, comment_id);
CREATE INDEX comment_group ON rft.comment (group_id) WHERE group_id IS NOT NULL;
CREATE UNIQUE INDEX comment_key ON rft.comment (session_user_name, key) WHERE key IS NOT NULL;
COMMENT ON TABLE rft.comment IS 'A comment of a person; append-only. Those about one target are a thread, the oldest first. An account that has not answered a blind question about the target sees its own only.';
COMMENT ON COLUMN rft.comment.comment_id IS 'Key, never reused.';
COMMENT ON COLUMN rft.comment.target IS 'What it is about.';
COMMENT ON COLUMN rft.comment.target_id IS 'Id of the experience, rollout, group or task.';
COMMENT ON COLUMN rft.comment.group_id IS 'Group that the target belongs to; NULL for a task.';
COMMENT ON COLUMN rft.comment.kind IS 'Kind of label, if it is about labelling the target with it; NULL otherwise.';
COMMENT ON COLUMN rft.comment.comment IS 'The text, up to 64 KiB.';
COMMENT ON COLUMN rft.comment.author IS 'The author: the given one, else the setting rft.author, else the session user.';
COMMENT ON COLUMN rft.comment.session_user_name IS 'The database account that wrote it, which the author cannot choose.';
COMMENT ON COLUMN rft.comment.key IS 'Key of the request, unique for the account: a repeated request adds no row.';
COMMENT ON COLUMN rft.comment.made_at IS 'When it was stored.';

CREATE FUNCTION rft.refuse_comment_change() RETURNS trigger
LANGUAGE plpgsql
AS $$
BEGIN
    IF TG_OP = 'UPDATE' AND coalesce(current_setting('rft.purge', true), '') <> ''
        AND pg_has_role(current_user, (SELECT relowner FROM pg_class WHERE oid = TG_RELID), 'USAGE') THEN
        RETURN NULL;
    END IF;
    RAISE EXCEPTION 'rft.comment is append-only: % is refused', TG_OP
        USING ERRCODE = 'integrity_constraint_violation', HINT = 'Write another comment, which corrects the first.';
END
$$;
COMMENT ON FUNCTION rft.refuse_comment_change() IS 'Trigger: comments do not change. The owner''s purge may remove texts.';
CREATE TRIGGER comment_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON rft.comment
    FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_comment_change();

-- Runs with the owner's rights, because people may lock no rows, and a purge or an archive must wait for the comment or be seen by it. A row is found by
-- the session's account, so nothing of other accounts is told. No role may execute it.
CREATE FUNCTION rft.fill_comment() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off
AS $$
DECLARE
    target record;
    about rft.label_target;
    place record;
    first rft.comment;
BEGIN
    IF NEW.kind IS NOT NULL THEN
        SELECT k.target INTO about FROM rft.v_label_kind k WHERE k.kind = NEW.kind;
        IF about IS DISTINCT FROM NEW.target THEN
            RAISE EXCEPTION 'a comment on % %: %', NEW.target, NEW.target_id,
                CASE WHEN about IS NULL THEN format('there is no kind of label "%s", or it was retired', left(NEW.kind, 100)) ELSE format('the kind of label "%s" is about a %s', NEW.kind, about) END
                USING ERRCODE = 'invalid_parameter_value', HINT = 'Correct the kind, or leave it out; nothing was stored.';
        END IF;
    END IF;
    target := rft.lock_annotated(NEW.target, NEW.target_id);
    IF NOT target.is_there THEN
        RAISE EXCEPTION 'there is no % %, which the comment would be about', NEW.target, NEW.target_id
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Correct the id; nothing was stored.';
    END IF;
    IF NEW.key IS NOT NULL THEN
        SELECT * INTO first FROM rft.comment c WHERE c.session_user_name = session_user AND c.key = NEW.key;
        IF first.comment_id IS NOT NULL THEN
            IF (first.target, first.target_id, first.kind) IS DISTINCT FROM (NEW.target, NEW.target_id, NEW.kind)
                OR (NOT target.is_purged AND first.comment <> NEW.comment) THEN
                PERFORM rft.refuse_used_key(NEW.key, 'comment ' || first.comment_id);
            END IF;
            RETURN NULL;  -- a repeated request
        END IF;
    END IF;
    IF target.is_purged THEN
        RAISE EXCEPTION '% % was purged: a comment is refused', NEW.target, NEW.target_id
            USING ERRCODE = 'RFT03', HINT = 'Its texts are gone for good; nothing was stored.';
    ELSIF btrim(NEW.comment, E' \t\n\r') = '' OR octet_length(NEW.comment) > 65536 THEN
        RAISE EXCEPTION 'the comment on % % has % bytes; 1 to 65536 are allowed', NEW.target, NEW.target_id, octet_length(btrim(NEW.comment, E' \t\n\r'))
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Correct it; nothing was stored.';
    END IF;
    NEW.group_id := target.of_group;
    IF NEW.group_id IS NULL THEN
        SELECT NULL::bigint AS run_id, t.taskset INTO place FROM rft.task t WHERE t.task_id = NEW.target_id;
    ELSE
        SELECT g.run_id, t.taskset INTO place FROM rft.rollout_group g LEFT JOIN rft.task t USING (task_id) WHERE g.group_id = NEW.group_id;
    END IF;
    IF NOT rft.may_label(NEW.kind, place.run_id, place.taskset) THEN  -- without a kind: one who may label anything there may comment
        RAISE EXCEPTION 'the account % may not comment on % %', session_user, NEW.target, NEW.target_id
            USING ERRCODE = 'insufficient_privilege', HINT = 'rft.label_permission lists what it may label; the owner changes it: rft label permit.';
    END IF;
    NEW.author := coalesce(nullif(NEW.author, ''), nullif(current_setting('rft.author', true), ''), session_user);
    NEW.session_user_name := session_user;
    NEW.made_at := clock_timestamp();
    RETURN NEW;
END
$$;
COMMENT ON FUNCTION rft.fill_comment() IS 'Trigger: checks a comment, and fills in author, account, group and time; skips a repeated request. Owner''s rights, to lock its target.';
-- An account is given by the owner alone, who imports comments: no role may write this column.
CREATE TRIGGER comment_fill BEFORE INSERT ON rft.comment FOR EACH ROW WHEN (NEW.session_user_name IS NULL) EXECUTE FUNCTION rft.fill_comment();
CREATE TRIGGER archived_comment_insert AFTER INSERT ON rft.comment REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_archived_change('group_id');

-- A comment may say what its author thinks of an item of a blind kind. It is hidden from an account that has not answered a blind item which the comment
-- may be about: one about its target, about what its target belongs to, or about what belongs to its target. An item is what was asked or annotated,
-- or what the comment names by its kind. Of a task, only items about the task count.
-- Runs with the owner's rights, because people see neither questions nor the annotations that are hidden. It is called with the key of a comment, so that
-- it tells nothing about targets without comments. Every role may execute it, as the policy does. No setting is read.
CREATE FUNCTION rft.may_see_comment(id bigint) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off SET enable_material = off SET enable_mergejoin = off
AS $$
    WITH said AS MATERIALIZED (SELECT c.* FROM rft.comment c WHERE c.comment_id = id),
    places (target, target_id) AS MATERIALIZED (
        SELECT c.target, c.target_id FROM said c
        UNION SELECT 'group', c.group_id FROM said c WHERE c.group_id IS NOT NULL
        UNION SELECT 'task', g.task_id FROM said c JOIN rft.rollout_group g ON g.group_id = c.group_id
        UNION SELECT 'rollout', e.rollout_id FROM said c JOIN rft.experience e ON e.experience_id = c.target_id WHERE c.target = 'experience'
        UNION SELECT 'rollout', o.rollout_id FROM said c JOIN rft.rollout o ON o.group_id = c.group_id WHERE c.target = 'group'
        UNION SELECT 'experience', e.experience_id FROM said c JOIN rft.experience e ON e.group_id = c.group_id
            WHERE c.target = 'group' OR c.target = 'rollout' AND e.rollout_id = c.target_id),
    items AS (
        SELECT k.kind, p.target_id, p.target = c.target AND p.target_id = c.target_id AND k.kind = c.kind AS is_named
        FROM said c CROSS JOIN places p
        JOIN (SELECT DISTINCT v.kind, v.target FROM rft.label_kind v WHERE v.kind = ANY (rft.blind_kinds())) k ON k.target = p.target)
    SELECT EXISTS (SELECT FROM said) AND NOT EXISTS (
        SELECT FROM items i
        WHERE (i.is_named OR EXISTS (SELECT FROM rft.question q WHERE q.target_id = i.target_id AND q.kind = i.kind)
                          OR EXISTS (SELECT FROM rft.annotation a WHERE a.target_id = i.target_id AND a.kind = i.kind))
          AND NOT rft.has_annotated(i.kind, i.target_id))
$$;
COMMENT ON FUNCTION rft.may_see_comment(bigint) IS 'Returns whether the session''s account has answered every blind question that a comment may be about. Owner''s rights, for row security.';

-- As rft.sees_annotation.
CREATE FUNCTION rft.sees_comment(id bigint, account text, blind text[]) RETURNS boolean
LANGUAGE plpgsql STABLE COST 0.0001
AS $$
BEGIN
    RETURN account OPERATOR(pg_catalog.=) session_user::text OR pg_catalog.cardinality(blind) OPERATOR(pg_catalog.=) 0 OR rft.may_see_comment(id);
END
$$;
COMMENT ON FUNCTION rft.sees_comment(bigint, text, text[]) IS 'Returns whether row security shows a comment to the session''s account: its own, all if no kind is blind, and those that tell no blind answer that it still owes.';

ALTER TABLE rft.comment ENABLE ROW LEVEL SECURITY;
CREATE POLICY comment_read ON rft.comment FOR SELECT USING (
    (SELECT rft.may_judge()) OR rft.sees_comment(comment_id, session_user_name, (SELECT rft.blind_kinds())::text[]));
CREATE POLICY comment_write ON rft.comment FOR INSERT WITH CHECK (true);  -- its trigger checks

-- As rft.purge_annotations.
CREATE FUNCTION rft.purge_comments(groups bigint[], of_tasks bigint[]) RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
    UPDATE rft.comment c SET comment = '[purged]' WHERE c.comment_id = ANY (ARRAY(
        SELECT n.comment_id FROM rft.comment n
        WHERE n.group_id = ANY (groups) AND (
            n.target <> 'experience' OR EXISTS (SELECT FROM rft.purged_experience x WHERE x.experience_id = n.target_id))
        UNION
        SELECT n.comment_id FROM rft.comment n WHERE n.target = 'task' AND n.target_id = ANY (of_tasks)
        UNION  -- of groups without an experience that was not purged
        SELECT n.comment_id FROM rft.rollout_group g JOIN rft.comment n ON n.group_id = g.group_id
        WHERE g.task_id = ANY (of_tasks) AND NOT EXISTS (
            SELECT FROM rft.experience e WHERE e.group_id = g.group_id AND NOT EXISTS (SELECT FROM rft.purged_experience x WHERE x.experience_id = e.experience_id))));
END
$$;
COMMENT ON FUNCTION rft.purge_comments(bigint[], bigint[]) IS 'Removes the texts of comments on purged experiences, their rollouts and groups, and on purged tasks.';

CREATE VIEW rft.v_comment_in_file WITH (security_invoker = true) AS
SELECT e.experience_id, c.target, c.kind, c.comment, c.author, c.session_user_name, c.made_at
FROM rft.comment c
JOIN rft.experience e ON e.group_id = c.group_id AND CASE c.target
    WHEN 'experience' THEN e.experience_id = c.target_id
    WHEN 'rollout' THEN e.experience_id = (SELECT min(f.experience_id) FROM rft.experience f WHERE f.group_id = c.group_id AND f.rollout_id = c.target_id)
    ELSE e.experience_id = (SELECT min(f.experience_id) FROM rft.experience f WHERE f.group_id = c.group_id) END;
COMMENT ON VIEW rft.v_comment_in_file IS 'Comments as files of experiences have them: those on a rollout or a group with its first experience.';

-- Runs with its caller's rights, who must be the owner: only the owner writes comments in the name of others.
CREATE FUNCTION rft.import_comments(given jsonb) RETURNS void
LANGUAGE sql
AS $$
    INSERT INTO rft.comment (target, target_id, group_id, kind, comment, author, session_user_name, made_at)
    SELECT i.target, CASE i.target WHEN 'experience' THEN e.experience_id WHEN 'rollout' THEN e.rollout_id ELSE e.group_id END, e.group_id, i.kind, i.comment,
           i.author, i.session_user_name, i.made_at
    FROM jsonb_populate_recordset(NULL::rft.v_comment_in_file, given) i JOIN rft.experience e USING (experience_id)
    ORDER BY i.made_at
$$;
COMMENT ON FUNCTION rft.import_comments(jsonb) IS 'Stores comments of a file on experiences that are stored already, their rollouts and groups.';
