-- Kinds of labels, in versions.

CREATE TABLE rft.label_kind (
    kind text NOT NULL CHECK (kind ~ '^[a-z][a-z0-9_]{0,62}$'),
    version integer NOT NULL CHECK (version > 0),
    type rft.label_type NOT NULL,
    target rft.label_target NOT NULL,
    spec jsonb NOT NULL DEFAULT '{}',
    level rft.label_level NOT NULL,
    blind boolean NOT NULL DEFAULT false,
    reopens boolean NOT NULL DEFAULT false,
    instruction text NOT NULL DEFAULT '' CHECK (octet_length(instruction) <= 65536),
    author text NOT NULL CHECK (author <> ''),
    session_user_name text NOT NULL,
    made_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    retired_at timestamptz,
    PRIMARY KEY (kind, version)
);
COMMENT ON TABLE rft.label_kind IS 'A version of a kind of label. A change is a new version; annotations keep theirs. The newest version that is not retired is the one to label with. A definition that changes nothing adds no version.';
COMMENT ON COLUMN rft.label_kind.kind IS 'Its name: small letters, digits and underscores.';
COMMENT ON COLUMN rft.label_kind.version IS 'From 1; the database assigns it.';
COMMENT ON COLUMN rft.label_kind.type IS 'Which values it has; the same in all versions.';
COMMENT ON COLUMN rft.label_kind.target IS 'What it is about; the same in all versions.';
COMMENT ON COLUMN rft.label_kind.spec IS 'Limits of its values. number, turns: min, max, step; choice: choices; tags: tags, open; rubric: criteria, each with min, max, step, description; spans: labels; other types: none.';
COMMENT ON COLUMN rft.label_kind.level IS 'How values are compared, for agreement; by default interval for number, ordinal for rubric, ranking and turns, else nominal.';
COMMENT ON COLUMN rft.label_kind.blind IS 'Whether an account sees the annotations of others only after its own (row security). The version to label with decides, or the newest if all are retired.';
COMMENT ON COLUMN rft.label_kind.reopens IS 'Whether an annotation returns its group to the pipeline, if the chain of its run reads the kind; not for kinds about tasks.';
COMMENT ON COLUMN rft.label_kind.instruction IS 'What people are told, up to 64 KiB.';
COMMENT ON COLUMN rft.label_kind.author IS 'Who defined it: the given author, else the setting rft.author, else the session user.';
COMMENT ON COLUMN rft.label_kind.session_user_name IS 'The database account that defined it, which the author cannot choose.';
COMMENT ON COLUMN rft.label_kind.made_at IS 'When it was defined.';
COMMENT ON COLUMN rft.label_kind.retired_at IS 'When it was retired; NULL while it can be used. Its annotations stay.';

-- Runs with the owner's rights, because LOCK TABLE requires them: two definitions at once wait for each other and get different versions.
-- It reads nothing but rft.label_kind, which every role may read, and believes no setting but the author's name. No role may execute it.
CREATE FUNCTION rft.fill_label_kind() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    newest rft.label_kind;
    used rft.label_kind;
    problem text;
BEGIN
    LOCK TABLE rft.label_kind IN SHARE ROW EXCLUSIVE MODE;
    NEW.level := coalesce(NEW.level, CASE WHEN NEW.type = 'number' THEN 'interval' WHEN NEW.type IN ('rubric', 'ranking', 'turns') THEN 'ordinal' ELSE 'nominal' END::rft.label_level);
    IF NEW.kind !~ '^[a-z][a-z0-9_]{0,62}$' THEN
        RAISE EXCEPTION 'a kind of label cannot be called "%"', left(NEW.kind, 100)
            USING ERRCODE = 'invalid_parameter_value', HINT = 'A name has small letters, digits and underscores, up to 63 of them, and begins with a letter.';
    END IF;
    problem := CASE
        WHEN NEW.type IN ('edit', 'spans') AND NEW.target <> 'experience' THEN format('is of the type %s, which is about an experience', NEW.type)
        WHEN NEW.type = 'ranking' AND NEW.target <> 'group' THEN 'is of the type ranking, which is about a group'
        WHEN NEW.type = 'turns' AND NEW.target NOT IN ('experience', 'rollout') THEN 'is of the type turns, which is about an experience or a rollout'
        WHEN NEW.reopens AND NEW.target = 'task' THEN 'is about a task and cannot reopen groups: set reopens to false'
        WHEN octet_length(NEW.instruction) > 65536 THEN format('has an instruction of %s bytes; up to 65536 are allowed', octet_length(NEW.instruction))
        WHEN octet_length(NEW.spec::text) > 65536 THEN format('has a specification of %s bytes; up to 65536 are allowed', octet_length(NEW.spec::text))
        ELSE 'has a specification that ' || rft.why_wrong_spec(NEW.type, NEW.spec) END;
    SELECT * INTO newest FROM rft.label_kind WHERE kind = NEW.kind ORDER BY version DESC LIMIT 1;
    IF problem IS NULL AND newest.kind IS NOT NULL AND (newest.type, newest.target) IS DISTINCT FROM (NEW.type, NEW.target) THEN
        problem := format('has the type %s and the target %s, which do not change: give the new kind another name', newest.type, newest.target);
    END IF;
    IF problem IS NOT NULL THEN
        RAISE EXCEPTION 'the kind of label "%" %', NEW.kind, problem
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Nothing was stored. `rft docs label` describes the types.';
    END IF;
    -- An import may have stored a later version that is retired; people go on with the one before.
    SELECT * INTO used FROM rft.label_kind WHERE kind = NEW.kind AND retired_at IS NULL ORDER BY version DESC LIMIT 1;
    IF used.kind IS NOT NULL AND (used.spec, used.level, used.blind, used.reopens, used.instruction)
        = (NEW.spec, NEW.level, NEW.blind, NEW.reopens, NEW.instruction) THEN
        RETURN NULL;  -- it is defined already
    END IF;
    NEW.version := coalesce(newest.version, 0) + 1;
    NEW.author := coalesce(nullif(NEW.author, ''), nullif(current_setting('rft.author', true), ''), session_user);
    NEW.session_user_name := session_user;
    NEW.made_at := clock_timestamp();
    NEW.retired_at := NULL;
    RETURN NEW;
END
$$;
COMMENT ON FUNCTION rft.fill_label_kind() IS 'Trigger: checks the definition of a kind of label and gives it the next version; skips one that changes nothing. Owner''s rights, to lock the table.';
CREATE TRIGGER label_kind_fill BEFORE INSERT ON rft.label_kind FOR EACH ROW EXECUTE FUNCTION rft.fill_label_kind();

CREATE FUNCTION rft.refuse_label_kind_change() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RAISE EXCEPTION 'a version of a kind of label does not change: % is refused', TG_OP
        USING ERRCODE = 'integrity_constraint_violation',
              HINT = 'INSERT the kind again, which adds a version, or retire it: UPDATE rft.label_kind SET retired_at = clock_timestamp() WHERE kind = ….';
END
$$;
COMMENT ON FUNCTION rft.refuse_label_kind_change() IS 'Trigger: of a kind of label only retired_at may be updated; the error names the alternatives.';
CREATE TRIGGER label_kind_facts
    BEFORE UPDATE OF kind, version, type, target, spec, level, blind, reopens, instruction, author, session_user_name, made_at
    ON rft.label_kind FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_label_kind_change();
CREATE TRIGGER label_kind_no_delete BEFORE DELETE OR TRUNCATE ON rft.label_kind FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_label_kind_change();

CREATE VIEW rft.v_label_kind AS
SELECT DISTINCT ON (k.kind) k.kind, k.version, k.type, k.target, k.spec, k.level, k.blind, k.reopens, k.instruction, k.author, k.made_at
FROM rft.label_kind k WHERE k.retired_at IS NULL ORDER BY k.kind, k.version DESC;
COMMENT ON VIEW rft.v_label_kind IS 'The version of each kind of label to label with: the newest that is not retired.';

-- Which kinds a chain reads. Its writer knows; a label of another kind reopens nothing.
ALTER TABLE rft.pipeline ADD COLUMN label_kinds text[] NOT NULL DEFAULT '{}';
COMMENT ON COLUMN rft.pipeline.label_kinds IS 'The kinds of labels that its stages read. An annotation of one of them returns its group to the pipeline, if the kind reopens.';
