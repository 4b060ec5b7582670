-- Which account may label what. The database roles decide who may label at all; see docs/decisions/0061.

CREATE TABLE rft.label_permission (
    label_permission_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    account text NOT NULL CHECK (account <> ''),
    kind text,
    run_id bigint REFERENCES rft.run,
    taskset text,
    author text NOT NULL DEFAULT coalesce(nullif(current_setting('rft.author', true), ''), session_user) CHECK (author <> ''),
    session_user_name text NOT NULL DEFAULT session_user,
    granted_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    revoked_at timestamptz
);
CREATE INDEX label_permission_account ON rft.label_permission (account);
COMMENT ON TABLE rft.label_permission IS 'What an account may label. An account without a row labels everything that its database role allows; one that ever had a row labels what its rows cover that are not revoked. Accounts of rft_worker are not limited.';
COMMENT ON COLUMN rft.label_permission.label_permission_id IS 'Key.';
COMMENT ON COLUMN rft.label_permission.account IS 'The database account.';
COMMENT ON COLUMN rft.label_permission.kind IS 'The kind of label; reward for rewards, for reviews without a kind and for pairs; NULL: all.';
COMMENT ON COLUMN rft.label_permission.run_id IS 'The run; NULL: all.';
COMMENT ON COLUMN rft.label_permission.taskset IS 'The taskset; NULL: all.';
COMMENT ON COLUMN rft.label_permission.author IS 'Who granted it.';
COMMENT ON COLUMN rft.label_permission.session_user_name IS 'The database account that granted it.';
COMMENT ON COLUMN rft.label_permission.granted_at IS 'When it was granted.';
COMMENT ON COLUMN rft.label_permission.revoked_at IS 'When it was revoked; NULL while it holds.';

CREATE FUNCTION rft.may_label(of_kind text, of_run bigint, of_taskset text) RETURNS boolean
LANGUAGE sql STABLE
AS $$
    SELECT NOT EXISTS (SELECT FROM rft.label_permission p WHERE p.account = session_user)
        OR EXISTS (SELECT FROM rft.label_permission p
                   WHERE p.account = session_user AND p.revoked_at IS NULL AND coalesce(p.kind = of_kind, true)
                     AND (p.run_id IS NULL OR p.run_id = of_run) AND (p.taskset IS NULL OR p.taskset = of_taskset))
        OR rft.may_judge()
$$;
COMMENT ON FUNCTION rft.may_label(text, bigint, text) IS 'Returns whether the session''s account may label with a kind (reward: rewards) in a run and a taskset.';

CREATE FUNCTION rft.refuse_unpermitted(of_kind text, of_what text) RETURNS void
LANGUAGE plpgsql STABLE
AS $$
BEGIN
    RAISE EXCEPTION 'the account % may not label % with "%"', session_user, of_what, of_kind
        USING ERRCODE = 'insufficient_privilege', HINT = 'rft.label_permission lists what it may label; the owner changes it: rft label permit.';
END
$$;
COMMENT ON FUNCTION rft.refuse_unpermitted(text, text) IS 'Raises the error about a label that rft.label_permission does not cover.';

-- By the names of triggers, this comes after rft.fill_annotation, which finds the group. An undo is not a label.
CREATE FUNCTION rft.check_annotation_permission() RETURNS trigger
LANGUAGE plpgsql
AS $$
DECLARE
    place record;
BEGIN
    IF NEW.undone_by IS NOT NULL OR NOT EXISTS (SELECT FROM rft.label_permission p WHERE p.account = session_user) THEN
        RETURN NEW;
    END IF;
    IF NEW.group_id IS NULL THEN
        SELECT NULL::bigint AS run_id, t.taskset INTO place FROM rft.task t WHERE t.task_id = NEW.target_id;
    ELSE
        SELECT g.run_id, t.taskset INTO place FROM rft.rollout_group g LEFT JOIN rft.task t USING (task_id) WHERE g.group_id = NEW.group_id;
    END IF;
    IF NOT rft.may_label(NEW.kind, place.run_id, place.taskset) THEN
        PERFORM rft.refuse_unpermitted(NEW.kind, NEW.target_id::text);
    END IF;
    RETURN NEW;
END
$$;
COMMENT ON FUNCTION rft.check_annotation_permission() IS 'Trigger: refuses annotations that rft.label_permission does not cover.';
CREATE TRIGGER annotation_permitted BEFORE INSERT ON rft.annotation FOR EACH ROW EXECUTE FUNCTION rft.check_annotation_permission();

CREATE FUNCTION rft.check_reward_permission() RETURNS trigger
LANGUAGE plpgsql
AS $$
DECLARE
    refused bigint;
BEGIN
    IF NOT EXISTS (SELECT FROM rft.label_permission p WHERE p.account = session_user) THEN
        RETURN NULL;
    END IF;
    SELECT e.experience_id INTO refused
    FROM new_rows n JOIN rft.experience e ON e.experience_id = n.experience_id JOIN rft.rollout_group g ON g.group_id = e.group_id
    LEFT JOIN rft.task t ON t.task_id = g.task_id
    WHERE NOT rft.may_label('reward', e.run_id, t.taskset) LIMIT 1;
    IF refused IS NOT NULL THEN
        PERFORM rft.refuse_unpermitted('reward', 'experience ' || refused);
    END IF;
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION rft.check_reward_permission() IS 'Trigger: refuses rewards, and answers to reviews without a kind, that rft.label_permission does not cover.';
CREATE TRIGGER experience_permitted AFTER UPDATE ON rft.experience REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION rft.check_reward_permission();
CREATE TRIGGER turn_reward_permitted AFTER UPDATE ON rft.turn_reward REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION rft.check_reward_permission();

-- A pair has two experiences, perhaps of different runs.
CREATE FUNCTION rft.check_pair_permission() RETURNS trigger
LANGUAGE plpgsql
AS $$
DECLARE
    refused bigint;
BEGIN
    IF NOT EXISTS (SELECT FROM rft.label_permission p WHERE p.account = session_user) THEN
        RETURN NULL;
    END IF;
    SELECT e.experience_id INTO refused
    FROM (SELECT chosen_id AS experience_id FROM new_rows UNION SELECT rejected_id FROM new_rows) n
    JOIN rft.experience e ON e.experience_id = n.experience_id JOIN rft.rollout_group g ON g.group_id = e.group_id
    LEFT JOIN rft.task t ON t.task_id = g.task_id
    WHERE NOT rft.may_label('reward', e.run_id, t.taskset) LIMIT 1;
    IF refused IS NOT NULL THEN
        PERFORM rft.refuse_unpermitted('reward', 'a pair with experience ' || refused);
    END IF;
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION rft.check_pair_permission() IS 'Trigger: refuses pairs that rft.label_permission does not cover.';
CREATE TRIGGER preference_pair_permitted AFTER INSERT ON rft.preference_pair REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION rft.check_pair_permission();
