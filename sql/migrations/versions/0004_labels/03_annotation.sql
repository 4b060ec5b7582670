-- Annotations: labels of every kind but the reward. Append-only; who wrote them, where they belong and what they supersede is filled in here.

CREATE TYPE rft.annotation_source AS ENUM ('human', 'judge', 'rule', 'import', 'adjudication');
COMMENT ON TYPE rft.annotation_source IS 'human: a person; judge: a model; rule: a program; import: a file of another tool; adjudication: a decision on annotations that disagree.';

CREATE TABLE rft.annotation (
    annotation_id bigint PRIMARY KEY,
    kind text NOT NULL,
    kind_version integer NOT NULL,
    type rft.label_type NOT NULL,
    target_id bigint NOT NULL,
    group_id bigint,
    value jsonb,
    source rft.annotation_source NOT NULL DEFAULT 'human',
    author text NOT NULL CHECK (author <> ''),
    session_user_name text NOT NULL,
    model text,
    confidence double precision,
    reason text,
    shown jsonb,
    seconds double precision,
    label_batch_id bigint NOT NULL,
    supersedes bigint UNIQUE,
    restores bigint,
    retracted boolean NOT NULL DEFAULT false,
    undone_by text,
    undone_session_user_name text,
    key text,
    made_at timestamptz NOT NULL,
    num double precision GENERATED ALWAYS AS (CASE WHEN type = 'bool' THEN (value::boolean)::integer::double precision WHEN type = 'number' THEN value::double precision END) STORED,
    choice text GENERATED ALWAYS AS (CASE WHEN type = 'choice' THEN value #>> '{}' END) STORED,
    CHECK (retracted = (value IS NULL))
);
-- The newest annotation of a target by a person is the end of one index range.
CREATE INDEX annotation_target ON rft.annotation (target_id, kind, annotation_id);
CREATE INDEX annotation_group ON rft.annotation (group_id, annotation_id) WHERE group_id IS NOT NULL;
CREATE INDEX annotation_batch ON rft.annotation (label_batch_id);
-- One standing annotation per kind, target, author, account and source: a chain has one beginning and, by UNIQUE (supersedes), no branches.
CREATE UNIQUE INDEX annotation_first ON rft.annotation (target_id, kind, source, session_user_name, author) WHERE supersedes IS NULL;
CREATE UNIQUE INDEX annotation_key ON rft.annotation (session_user_name, key) WHERE key IS NOT NULL;
COMMENT ON TABLE rft.annotation IS 'One label of a kind; append-only. A further one by the same author, account and source for the same target supersedes it. rft.v_annotation shows what stands. Of a blind kind an account sees those of others only after its own.';
COMMENT ON COLUMN rft.annotation.annotation_id IS 'Key, never reused, from the sequence of label_id: the cut of a verdict or of a selection covers both.';
COMMENT ON COLUMN rft.annotation.kind IS 'Kind of label.';
COMMENT ON COLUMN rft.annotation.kind_version IS 'Version of the kind; the newest one by default. Another one is refused, since the kind was changed after it was shown.';
COMMENT ON COLUMN rft.annotation.type IS 'Type of the kind.';
COMMENT ON COLUMN rft.annotation.target_id IS 'Id of the experience, rollout, group or task, as the kind says.';
COMMENT ON COLUMN rft.annotation.group_id IS 'Group that the target belongs to; NULL for a task.';
COMMENT ON COLUMN rft.annotation.value IS 'The value, as its type requires; NULL if it was retracted.';
COMMENT ON COLUMN rft.annotation.source IS 'Who or what decided on it. judge, rule and adjudication need the rights of rft_worker.';
COMMENT ON COLUMN rft.annotation.author IS 'The author: the given one, else the setting rft.author, else the session user.';
COMMENT ON COLUMN rft.annotation.session_user_name IS 'The database account that wrote it, which the author cannot choose; of an undo, that of what was undone.';
COMMENT ON COLUMN rft.annotation.model IS 'The judge''s model; NULL if a person or a rule decided.';
COMMENT ON COLUMN rft.annotation.confidence IS 'How sure the author is, from 0 to 1; NULL if unknown.';
COMMENT ON COLUMN rft.annotation.reason IS 'The reason, up to 64 KiB: the given one, else the setting rft.reason.';
COMMENT ON COLUMN rft.annotation.shown IS 'What the author was shown, for example the order of answers and a suggestion; up to 64 KiB.';
COMMENT ON COLUMN rft.annotation.seconds IS 'How long the author took; NULL if unknown.';
COMMENT ON COLUMN rft.annotation.label_batch_id IS 'Its row of rft.label_batch. Annotations of one statement or import have the same id and are undone together.';
COMMENT ON COLUMN rft.annotation.supersedes IS 'The annotation that no longer stands because of it; filled in by the database. A given one must be the one that stands.';
COMMENT ON COLUMN rft.annotation.restores IS 'Of an undo, the earlier annotation whose value stands again; NULL otherwise.';
COMMENT ON COLUMN rft.annotation.retracted IS 'Whether nothing stands any more: an undo of the author''s first annotation of the target.';
COMMENT ON COLUMN rft.annotation.undone_by IS 'Of an undo, its author; NULL otherwise.';
COMMENT ON COLUMN rft.annotation.undone_session_user_name IS 'Of an undo, the database account that ran it; NULL otherwise.';
COMMENT ON COLUMN rft.annotation.key IS 'Key of the request, unique for the account: a repeated request adds no row.';
COMMENT ON COLUMN rft.annotation.made_at IS 'When it was stored.';
COMMENT ON COLUMN rft.annotation.num IS 'The value of the types number and bool (1 or 0) as a number; NULL for others.';
COMMENT ON COLUMN rft.annotation.choice IS 'The value of the type choice; NULL for others.';

CREATE FUNCTION rft.refuse_annotation_change() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF TG_OP = 'UPDATE' AND coalesce(current_setting('rft.purge', true), '') <> ''
        AND pg_has_role(current_user, (SELECT relowner FROM pg_class WHERE oid = TG_RELID), 'USAGE') THEN
        RETURN NULL;
    END IF;
    RAISE EXCEPTION 'rft.annotation is append-only: % is refused', TG_OP
        USING ERRCODE = 'integrity_constraint_violation',
              HINT = 'INSERT another value for the same target, which supersedes the first, or undo it: SELECT * FROM rft.undo_annotations(…).';
END
$$;
COMMENT ON FUNCTION rft.refuse_annotation_change() IS 'Trigger: annotations do not change; the error names the alternatives. The owner''s purge may remove texts.';
CREATE TRIGGER annotation_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON rft.annotation
    FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_annotation_change();

-- session_user, because within a SECURITY DEFINER function current_user is the owner for everybody. Row security calls these functions with the
-- session's settings, so each sets its search path: an account's temporary view pg_roles would decide what the account may see.
CREATE FUNCTION rft.may_judge() RETURNS boolean
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT pg_has_role(session_user, (SELECT nspowner FROM pg_namespace WHERE nspname = 'rft'), 'MEMBER')
        OR EXISTS (SELECT FROM pg_roles WHERE rolname = 'rft_worker' AND pg_has_role(session_user, oid, 'MEMBER'))
$$;
COMMENT ON FUNCTION rft.may_judge() IS 'Returns whether the session''s account has the rights of rft_worker or of the owner: it sees annotations of blind kinds, undoes those of others, and writes those of judges and rules.';

-- Who counts as one person. An account chooses the author of what it writes, so its own name counts. Several people write through the accounts of the
-- owner and of workers (imports, the studio's owner), whose authors are believed.
CREATE FUNCTION rft.shared_accounts() RETURNS text[]
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT coalesce(array_agg(r.rolname::text), '{}') FROM pg_roles r
    WHERE pg_has_role(r.oid, (SELECT nspowner FROM pg_namespace WHERE nspname = 'rft'), 'MEMBER')
        OR EXISTS (SELECT FROM pg_roles w WHERE w.rolname = 'rft_worker' AND pg_has_role(r.oid, w.oid, 'MEMBER'))
$$;
COMMENT ON FUNCTION rft.shared_accounts() IS 'Returns the accounts with the rights of rft_worker or of the owner: each of their authors counts as a person.';

CREATE FUNCTION rft.person(author text, account text, shared text[]) RETURNS text
LANGUAGE sql IMMUTABLE
AS $$
    SELECT CASE WHEN account = ANY (shared) THEN author ELSE account END
$$;
COMMENT ON FUNCTION rft.person(text, text, text[]) IS 'Returns who counts as one person: the account, or the author if the account is one of rft.shared_accounts().';

-- Blind kinds. Views of annotations have security_invoker, and functions read them with their caller's rights, so that none shows what this hides.
CREATE FUNCTION rft.blind_kinds() RETURNS text[]
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT coalesce(array_agg(k.kind), '{}')
    FROM (SELECT DISTINCT ON (n.kind) n.kind, n.blind FROM rft.label_kind n ORDER BY n.kind, n.retired_at IS NOT NULL, n.version DESC) k
    WHERE k.blind
$$;
COMMENT ON FUNCTION rft.blind_kinds() IS 'Returns the kinds that are blind in the version to label with, or in the newest if all are retired.';

-- Runs with the owner's rights, because the policy of rft.annotation would otherwise call itself. It tells an account about its own rows alone.
-- Every role may execute it, as the policy does. No setting is read. Rows of the running transaction do not count: it may still be rolled back, and then
-- no row would tell that the account has seen the others'. What was undone or superseded since counts, since it stays, and agreement uses the first one.
-- A row of the source import is no answer: agreement does not compare it, and an answer after it would count as blind.
CREATE FUNCTION rft.has_annotated(of_kind text, of_target bigint) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT EXISTS (SELECT FROM rft.annotation a
                   WHERE a.target_id = of_target AND a.kind = of_kind AND a.session_user_name = session_user AND NOT a.retracted
                     AND a.source IN ('human', 'adjudication') AND a.made_at < transaction_timestamp())
$$;
COMMENT ON FUNCTION rft.has_annotated(text, bigint) IS 'Returns whether the session''s account has answered about a target, in an earlier transaction. Owner''s rights, for row security.';

-- A query's own conditions may run before a policy if their operators are leakproof, as those of numbers and texts are, and cheaper. EXPLAIN ANALYZE then
-- tells whether a hidden row meets them. A policy is therefore one call that costs less than any operator. The function has no search path, which would
-- cost as much as all the rest, and names the schema of each operator instead.
CREATE FUNCTION rft.sees_annotation(of_kind text, of_target bigint, account text, blind text[]) RETURNS boolean
LANGUAGE plpgsql STABLE COST 0.0001
AS $$
BEGIN
    RETURN account OPERATOR(pg_catalog.=) session_user::text OR of_kind OPERATOR(pg_catalog.<>) ALL (blind) OR rft.has_annotated(of_kind, of_target);
END
$$;
COMMENT ON FUNCTION rft.sees_annotation(text, bigint, text, text[]) IS 'Returns whether row security shows an annotation to the session''s account: its own, those of kinds that are not blind, and those about targets that it has answered about.';

ALTER TABLE rft.annotation ENABLE ROW LEVEL SECURITY;
CREATE POLICY annotation_read ON rft.annotation FOR SELECT USING (
    (SELECT rft.may_judge()) OR rft.sees_annotation(kind, target_id, session_user_name, (SELECT rft.blind_kinds())::text[]));
CREATE POLICY annotation_write ON rft.annotation FOR INSERT WITH CHECK (true);  -- its triggers check

-- A transaction that answers a review locks the review and then waits for its group, so nothing may wait for a review while it holds the group
-- (see rft.lock_groups_and_reviews). This one is called for every row, and does without a subtransaction. If a review was added between its two
-- steps, it takes the new one only if it is free.
CREATE FUNCTION rft.lock_annotated_group(of_group bigint) RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    num_locked bigint;
BEGIN
    PERFORM FROM rft.review WHERE group_id = of_group ORDER BY review_id FOR NO KEY UPDATE;
    GET DIAGNOSTICS num_locked = ROW_COUNT;
    PERFORM FROM rft.rollout_group WHERE group_id = of_group FOR UPDATE;
    IF num_locked <> (SELECT count(*) FROM rft.review WHERE group_id = of_group) THEN
        PERFORM FROM rft.review WHERE group_id = of_group ORDER BY review_id FOR NO KEY UPDATE NOWAIT;
    END IF;
END
$$;
COMMENT ON FUNCTION rft.lock_annotated_group(bigint) IS 'Locks the group of an annotation, and its reviews, before the annotation gets its id.';

-- What is about a target is locked with it and its group: two annotations of one target come one after the other, and a purge or an archive waits for
-- them or is seen by them. A purge locks experiences, groups and tasks; it locks no rollouts. Within a group, ids grow in the order in which they commit
-- (see rft.record_labels), since it is locked before an annotation gets its id. A chain may read a kind that does not reopen: the cut of its verdict
-- must cover every annotation up to it, too.
CREATE FUNCTION rft.lock_annotated(of_target rft.label_target, of_id bigint,
    OUT is_there boolean, OUT of_group bigint, OUT is_purged boolean, OUT is_group_purged boolean)
LANGUAGE plpgsql
AS $$
BEGIN
    CASE of_target
        WHEN 'experience' THEN SELECT true, e.group_id INTO is_there, of_group FROM rft.experience e WHERE e.experience_id = of_id FOR NO KEY UPDATE;
        WHEN 'rollout' THEN SELECT true, o.group_id INTO is_there, of_group FROM rft.rollout o WHERE o.rollout_id = of_id FOR NO KEY UPDATE;
        WHEN 'group' THEN SELECT true, g.group_id INTO is_there, of_group FROM rft.rollout_group g WHERE g.group_id = of_id;
        WHEN 'task' THEN
            SELECT true, t.payload = '{"purged": true}' INTO is_there, is_purged FROM rft.task t WHERE t.task_id = of_id FOR NO KEY UPDATE;
    END CASE;
    is_there := coalesce(is_there, false);
    IF of_group IS NULL THEN
        RETURN;
    END IF;
    PERFORM rft.lock_annotated_group(of_group);
    -- A statement of its own: it sees a purge that held the locks before. A group without an experience belongs to its task.
    SELECT EXISTS (SELECT FROM rft.purged_experience p WHERE p.experience_id = ANY (e.ids))
           OR (e.ids = '{}' AND EXISTS (SELECT FROM rft.task t WHERE t.task_id = g.task_id AND t.payload = '{"purged": true}')),
           EXISTS (SELECT FROM rft.purged_experience p WHERE p.experience_id = ANY (CASE of_target
               WHEN 'experience' THEN ARRAY[of_id]
               WHEN 'rollout' THEN ARRAY(SELECT x.experience_id FROM rft.experience x WHERE x.group_id = of_group AND x.rollout_id = of_id) END))
    INTO is_group_purged, is_purged
    FROM rft.rollout_group g CROSS JOIN LATERAL (
        SELECT ARRAY(SELECT x.experience_id FROM rft.experience x WHERE x.group_id = of_group) AS ids) e
    WHERE g.group_id = of_group;
    IF is_group_purged AND NOT is_purged THEN  -- a rollout without an answer belongs to its group
        is_purged := of_target = 'group' OR NOT EXISTS (SELECT FROM rft.experience x
            WHERE x.group_id = of_group AND NOT EXISTS (SELECT FROM rft.purged_experience p WHERE p.experience_id = x.experience_id));
    END IF;
END
$$;
COMMENT ON FUNCTION rft.lock_annotated(rft.label_target, bigint) IS 'Locks the target of an annotation and its group; returns whether it exists, its group, and whether it, or anything of its group, was purged.';

CREATE FUNCTION rft.why_wrong_place(k rft.label_kind, of_id bigint, of_group bigint, value jsonb) RETURNS text
LANGUAGE plpgsql STABLE
AS $$
DECLARE
    most integer;
    longest integer;
    wrong text;
BEGIN
    IF k.type = 'spans' THEN
        SELECT num_response_tokens, length(response) INTO most, longest FROM rft.experience WHERE experience_id = of_id;
        SELECT format('has a span up to %s %s of %s', s ->> 'end', coalesce(s ->> 'unit', 'token'), CASE WHEN s ->> 'unit' = 'char' THEN longest ELSE most END)
        INTO wrong FROM jsonb_array_elements(value) s
        WHERE (s ->> 'end')::integer > CASE WHEN s ->> 'unit' = 'char' THEN longest ELSE most END LIMIT 1;
    ELSIF k.type = 'turns' THEN
        IF k.target = 'rollout' THEN
            SELECT num_turns INTO most FROM rft.rollout WHERE rollout_id = of_id;
        ELSE
            SELECT o.num_turns INTO most FROM rft.experience e JOIN rft.rollout o USING (rollout_id) WHERE e.experience_id = of_id;
        END IF;
        SELECT format('has turn %s; the rollout has %s, from 0', t ->> 'turn', most) INTO wrong
        FROM jsonb_array_elements(value) t WHERE (t ->> 'turn')::integer >= most LIMIT 1;
    ELSIF k.type = 'edit' THEN
        SELECT 'is the response as it is: change it' INTO wrong FROM rft.experience WHERE experience_id = of_id AND response = value ->> 'response';
    ELSIF k.type = 'ranking' THEN
        SELECT format('ranks experience %s, which is not of group %s', i, of_group) INTO wrong
        FROM jsonb_path_query(value, '$.order[*][*]') i
        WHERE NOT EXISTS (SELECT FROM rft.experience e WHERE e.experience_id = (i #>> '{}')::bigint AND e.group_id = of_group) LIMIT 1;
    END IF;
    RETURN wrong;
END
$$;
COMMENT ON FUNCTION rft.why_wrong_place(rft.label_kind, bigint, bigint, jsonb) IS 'Returns why spans, turns, an edit or a ranking do not fit their target, as the end of the sentence "the value …"; NULL if they do.';

CREATE FUNCTION rft.why_too_large(a rft.annotation) RETURNS text
LANGUAGE sql IMMUTABLE
AS $$
    SELECT format('%s has %s bytes; up to %s are allowed', t.name, t.size, t.most)
    FROM (VALUES ('the reason', octet_length(a.reason), 65536), ('shown', octet_length(a.shown::text), 65536), ('the author', octet_length(a.author), 200),
                 ('the model', octet_length(a.model), 1000), ('the key', octet_length(a.key), 200),
                 ('the value', octet_length(a.value::text), CASE WHEN a.type IN ('edit', 'spans', 'turns') THEN 1048576 ELSE 65536 END)) AS t (name, size, most)
    WHERE t.size > t.most LIMIT 1
$$;
COMMENT ON FUNCTION rft.why_too_large(rft.annotation) IS 'Returns which text of an annotation is too long; NULL if none is. Values have up to 64 KiB; edits, spans and turns up to 1 MiB.';

-- An undo: the row says which annotation it supersedes, and either which earlier one it restores or that it is retracted. Everything else is theirs.
CREATE FUNCTION rft.fill_undo(a rft.annotation) RETURNS rft.annotation
LANGUAGE plpgsql
AS $$
DECLARE
    undone rft.annotation;
    earlier rft.annotation;
BEGIN
    SELECT * INTO undone FROM rft.annotation WHERE annotation_id = a.supersedes;
    IF undone.annotation_id IS NULL OR NOT (undone.session_user_name = session_user OR rft.may_judge()) THEN
        RAISE EXCEPTION 'annotation % does not exist, or another account wrote it', a.supersedes
            USING ERRCODE = 'insufficient_privilege', HINT = 'An account undoes its own annotations; rft_worker and the owner undo all.';
    END IF;
    IF rft.why_too_large(a) IS NOT NULL THEN
        RAISE EXCEPTION 'the undo of annotation %: %', a.supersedes, rft.why_too_large(a)
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Shorten it; nothing was stored.';
    END IF;
    IF (rft.lock_annotated((SELECT target FROM rft.label_kind WHERE kind = undone.kind AND version = undone.kind_version), undone.target_id)).is_purged THEN
        a.reason := NULL;  -- no text about what was purged
    END IF;
    IF EXISTS (SELECT FROM rft.annotation WHERE supersedes = undone.annotation_id) THEN
        RAISE EXCEPTION 'annotation % was superseded meanwhile', a.supersedes
            USING ERRCODE = 'serialization_failure', HINT = 'Run it again; nothing was stored.';
    END IF;
    a.kind := undone.kind; a.kind_version := undone.kind_version; a.type := undone.type; a.target_id := undone.target_id; a.group_id := undone.group_id;
    a.source := undone.source; a.author := undone.author; a.session_user_name := undone.session_user_name;
    a.value := NULL; a.model := NULL; a.confidence := NULL; a.shown := NULL; a.seconds := NULL;
    a.retracted := a.restores IS NULL;
    IF a.restores IS NOT NULL THEN
        SELECT * INTO earlier FROM rft.annotation WHERE annotation_id = a.restores;
        IF earlier.retracted IS NOT FALSE OR (earlier.kind, earlier.target_id, earlier.source, earlier.author, earlier.session_user_name)
           IS DISTINCT FROM (a.kind, a.target_id, a.source, a.author, a.session_user_name) THEN
            RAISE EXCEPTION 'annotation % is not an earlier one of the same author about the same target', a.restores
                USING ERRCODE = 'invalid_parameter_value', HINT = 'Use rft.undo_annotations(…), which finds it.';
        END IF;
        a.kind_version := earlier.kind_version; a.value := earlier.value; a.model := earlier.model; a.confidence := earlier.confidence;
        a.shown := earlier.shown; a.seconds := earlier.seconds;
    END IF;
    a.undone_by := coalesce(nullif(current_setting('rft.author', true), ''), session_user);
    a.undone_session_user_name := session_user;
    RETURN a;
END
$$;
COMMENT ON FUNCTION rft.fill_undo(rft.annotation) IS 'Fills in a row that undoes an annotation. Called by the trigger of rft.annotation.';

CREATE FUNCTION rft.check_annotation(a rft.annotation, k rft.label_kind, newest integer, is_purged boolean) RETURNS void
LANGUAGE plpgsql STABLE
AS $$
DECLARE
    problem text;
BEGIN
    IF newest IS NULL THEN
        RAISE EXCEPTION 'the kind of label "%" is retired', a.kind USING ERRCODE = 'RFT04', HINT = 'rft label kind list has the kinds to label with; define it again to use it.';
    ELSIF a.kind_version <> newest THEN
        RAISE EXCEPTION 'the kind of label "%" was changed: this is a label of version %, and the newest is %', a.kind, a.kind_version, newest
            USING ERRCODE = 'RFT04', HINT = 'Load the kind again, with its new instruction and values, and label again; nothing was stored.';
    ELSIF is_purged THEN
        RAISE EXCEPTION '% % was purged%: "%" is refused', k.target, a.target_id, CASE WHEN a.source IN ('judge', 'rule') THEN ', or another answer of its group' END, a.kind
            USING ERRCODE = 'RFT03', HINT = 'Its texts are gone for good. Remove it from the labels; nothing was stored.';
    ELSIF a.source IN ('judge', 'rule', 'adjudication') AND NOT rft.may_judge() THEN
        RAISE EXCEPTION 'the account % may not write annotations of the source %', session_user, a.source
            USING ERRCODE = 'insufficient_privilege', HINT = 'Its own have the source human, or import if they come from a file.';
    END IF;
    problem := coalesce(
        rft.why_too_large(a),
        CASE WHEN NOT coalesce(a.confidence BETWEEN 0 AND 1, true) THEN format('the confidence is %s; it must be from 0 to 1', a.confidence)
             WHEN NOT coalesce(a.seconds BETWEEN 0 AND 1e9, true) THEN format('seconds is %s; it must be a finite number of 0 or more', a.seconds)
             WHEN a.key = '' THEN 'the key is empty; it must be NULL or a text' END,
        'the value ' || coalesce(rft.why_wrong_value(k.type, k.spec, a.value), rft.why_wrong_place(k, a.target_id, a.group_id, a.value)));
    IF problem IS NOT NULL THEN
        RAISE EXCEPTION '"%" of % %: %', a.kind, k.target, a.target_id, problem
            USING ERRCODE = 'invalid_parameter_value',
                  DETAIL = CASE WHEN octet_length(a.value::text) < 200 THEN 'The value is ' || a.value::text ELSE 'The value is longer than can be shown.' END, HINT = 'Correct it; nothing was stored.';
    END IF;
END
$$;
COMMENT ON FUNCTION rft.check_annotation(rft.annotation, rft.label_kind, integer, boolean) IS 'Refuses an annotation that does not fit its kind, or whose kind, target or source does not accept it. Called by the trigger of rft.annotation.';

CREATE FUNCTION rft.refuse_used_key(used_key text, used_for text) RETURNS void
LANGUAGE plpgsql STABLE
AS $$
BEGIN
    RAISE EXCEPTION 'the key "%" was used for %, which has another target, kind or content', used_key, used_for
        USING ERRCODE = 'invalid_parameter_value', HINT = 'Use a new key for each request; repeat one only with the same request.';
END
$$;
COMMENT ON FUNCTION rft.refuse_used_key(text, text) IS 'Raises the error about a request that repeats the key of another one.';

-- Before the rows: labels and annotations share one sequence, so rft.lock_labels must wait for both.
-- Runs with the owner's rights, because LOCK TABLE requires them. rft.label_batch is the caller's setting: rft.own_label_batch refuses a batch of
-- another account. No role may execute it.
CREATE FUNCTION rft.begin_annotations() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    LOCK TABLE rft.label IN ROW EXCLUSIVE MODE;
    PERFORM set_config('rft.annotation_batch', rft.own_label_batch(nullif(current_setting('rft.label_batch', true), '')::bigint)::text, true);
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION rft.begin_annotations() IS 'Trigger: begins the batch of a statement that adds annotations. Owner''s rights, to lock rft.label.';
CREATE TRIGGER annotation_begin BEFORE INSERT ON rft.annotation FOR EACH STATEMENT EXECUTE FUNCTION rft.begin_annotations();

-- Runs with the owner's rights, because labellers may lock no rows. It answers with nothing of other accounts' rows: a row is found by the session's
-- account, except for an undo, which asks who may. The account is session_user; author and reason are names that the caller may choose. The batch
-- of the setting is compared with the account again when the statement ends (rft.record_annotations). No role may execute it.
CREATE FUNCTION rft.fill_annotation() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off
AS $$
DECLARE
    k rft.label_kind;
    newest integer;
    target record;
    first rft.annotation;
    tip bigint;
BEGIN
    NEW.session_user_name := session_user;
    IF NEW.key IS NOT NULL THEN
        SELECT * INTO first FROM rft.annotation WHERE session_user_name = session_user AND key = NEW.key;
    END IF;
    IF NEW.supersedes IS NOT NULL AND (NEW.retracted OR NEW.restores IS NOT NULL) THEN
        IF first.annotation_id IS NOT NULL THEN
            IF first.undone_by IS NULL OR (first.supersedes, first.restores) IS DISTINCT FROM (NEW.supersedes, NEW.restores) THEN
                PERFORM rft.refuse_used_key(NEW.key, 'annotation ' || first.annotation_id);
            END IF;
            RETURN NULL;  -- a repeated request
        END IF;
        NEW := rft.fill_undo(NEW);
        SELECT * INTO k FROM rft.label_kind WHERE kind = NEW.kind AND version = NEW.kind_version;
    ELSE
        newest := (SELECT max(version) FROM rft.label_kind WHERE kind = NEW.kind AND retired_at IS NULL);
        NEW.kind_version := coalesce(NEW.kind_version, newest, (SELECT max(version) FROM rft.label_kind WHERE kind = NEW.kind));
        SELECT * INTO k FROM rft.label_kind WHERE kind = NEW.kind AND version = NEW.kind_version;
        IF k.kind IS NULL THEN
            RAISE EXCEPTION 'there is no kind of label "%"%', left(NEW.kind, 100), ' of version ' || NEW.kind_version
                USING ERRCODE = 'invalid_parameter_value',
                      HINT = format('Kinds: %s. Define one with rft label kind define, or INSERT INTO rft.label_kind.',
                          coalesce((SELECT string_agg(v.kind, ', ' ORDER BY v.kind) FROM rft.v_label_kind v), 'none'));
        END IF;
        target := rft.lock_annotated(k.target, NEW.target_id);
        IF NOT target.is_there THEN
            RAISE EXCEPTION 'there is no % %, which "%" would be about', k.target, NEW.target_id, NEW.kind
                USING ERRCODE = 'invalid_parameter_value', HINT = 'Correct the id; nothing was stored.';
        END IF;
        IF NEW.key IS NOT NULL THEN  -- again: a request at the same time has waited at the target
            SELECT * INTO first FROM rft.annotation WHERE session_user_name = session_user AND key = NEW.key;
        END IF;
        IF first.annotation_id IS NOT NULL THEN
            -- Of what was purged meanwhile, the texts cannot be compared.
            IF (first.kind, first.target_id) IS DISTINCT FROM (NEW.kind, NEW.target_id)
                OR (NOT target.is_purged AND (first.value, coalesce(first.reason, ''))
                    IS DISTINCT FROM (NEW.value, coalesce(NEW.reason, nullif(current_setting('rft.reason', true), ''), first.reason, ''))) THEN
                PERFORM rft.refuse_used_key(NEW.key, 'annotation ' || first.annotation_id);
            END IF;
            RETURN NULL;  -- a repeated request
        END IF;
        NEW.type := k.type;
        NEW.group_id := target.of_group;
        NEW.author := coalesce(nullif(NEW.author, ''), nullif(current_setting('rft.author', true), ''), session_user);
        NEW.reason := coalesce(NEW.reason, nullif(current_setting('rft.reason', true), ''));
        NEW.undone_by := NULL; NEW.undone_session_user_name := NULL; NEW.restores := NULL; NEW.retracted := false;
        -- What judges and rules say may quote any answer of the group.
        PERFORM rft.check_annotation(NEW, k, newest, target.is_purged OR (NEW.source IN ('judge', 'rule') AND coalesce(target.is_group_purged, false)));
        -- OFFSET 0: else the primary key is read backwards, through the annotations of all targets, where statistics are old.
        SELECT max(a.annotation_id) INTO tip FROM (
            SELECT * FROM rft.annotation n WHERE n.target_id = NEW.target_id AND n.kind = NEW.kind OFFSET 0) a
        WHERE a.author = NEW.author AND a.session_user_name = session_user AND a.source = NEW.source;
        IF NEW.supersedes IS NOT NULL AND NEW.supersedes IS DISTINCT FROM tip THEN
            RAISE EXCEPTION '"%" of % %: annotation % is not the one that stands', NEW.kind, k.target, NEW.target_id, NEW.supersedes
                USING ERRCODE = 'RFT04', HINT = 'It was changed meanwhile, in another window perhaps: load it again; nothing was stored.';
        END IF;
        NEW.supersedes := tip;
    END IF;
    NEW.annotation_id := nextval('rft.label_label_id_seq');
    NEW.label_batch_id := current_setting('rft.annotation_batch')::bigint;
    NEW.made_at := clock_timestamp();
    RETURN NEW;
END
$$;
COMMENT ON FUNCTION rft.fill_annotation() IS 'Trigger: checks an annotation, and fills in author, account, group, batch, id and what it supersedes; skips a repeated request. Owner''s rights, to lock its target.';
-- An id is given by the owner alone, who copies annotations (07_copy.sql): no role may write this column.
CREATE TRIGGER annotation_fill BEFORE INSERT ON rft.annotation FOR EACH ROW WHEN (NEW.annotation_id IS NULL) EXECUTE FUNCTION rft.fill_annotation();

-- By the names of triggers, this comes before the reopening.
CREATE TRIGGER annotation_archived AFTER INSERT ON rft.annotation REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_archived_change('group_id');

-- Runs with the owner's rights, because labellers may not change groups. What it changes follows from the rows that were stored and from what the
-- chains of their runs read. No role may execute it.
CREATE FUNCTION rft.record_annotations() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off SET enable_material = off SET enable_mergejoin = off
AS $$
DECLARE
    stored record;
    touched bigint[];
BEGIN
    SELECT count(*) AS num, min(n.label_batch_id) AS batch INTO stored FROM new_rows n;
    IF stored.num = 0 THEN
        RETURN NULL;
    END IF;
    -- The setting that names the batch may have been changed within the statement.
    PERFORM rft.own_label_batch(b.label_batch_id) FROM (SELECT DISTINCT label_batch_id FROM new_rows) b;
    -- What judges and rules say is a suggestion, which often comes from the chain that decides on the group.
    SELECT array_agg(DISTINCT n.group_id) INTO touched
    FROM (SELECT DISTINCT group_id, kind, kind_version FROM new_rows WHERE group_id IS NOT NULL AND source NOT IN ('judge', 'rule')) n
    CROSS JOIN LATERAL (SELECT reopens FROM rft.label_kind WHERE kind = n.kind AND version = n.kind_version OFFSET 0) k
    CROSS JOIN LATERAL (SELECT run_id FROM rft.rollout_group WHERE group_id = n.group_id OFFSET 0) g
    CROSS JOIN LATERAL (SELECT pipeline_version FROM rft.run WHERE run_id = g.run_id OFFSET 0) r
    CROSS JOIN LATERAL (SELECT label_kinds FROM rft.pipeline WHERE pipeline_version = r.pipeline_version OFFSET 0) p
    WHERE k.reopens AND n.kind = ANY (p.label_kinds);
    IF touched IS NOT NULL THEN
        PERFORM rft.reopen_groups(touched);
    END IF;
    IF coalesce(current_setting('rft.label_batch', true), '') = '' THEN  -- written by a person in SQL, who has not seen the id
        RAISE NOTICE 'label batch %: % stored', stored.batch, stored.num USING HINT = format('rft label undo %s', stored.batch);
    END IF;
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION rft.record_annotations() IS 'Trigger: reopens the groups of annotations by people whose kind reopens and is read by the chain of their run. Owner''s rights, to change groups.';
CREATE TRIGGER annotation_record AFTER INSERT ON rft.annotation REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION rft.record_annotations();
