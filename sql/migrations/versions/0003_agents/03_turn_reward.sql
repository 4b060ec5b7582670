-- Rewards of single turns as rows, corrected by SQL like those of experiences. See docs/decisions/0054.

CREATE TABLE rft.turn_reward (
    experience_id bigint NOT NULL,
    turn integer NOT NULL CHECK (turn >= 0),
    -- Trainers compute with float32, in which a greater number is infinite.
    reward_sampled double precision NOT NULL CHECK (abs(reward_sampled) < 3.4e38),
    reward double precision NOT NULL CHECK (abs(reward) < 3.4e38),
    PRIMARY KEY (experience_id, turn)
);
-- Almost always tiny. A draw looks here first, and reads the rewards of turns only of the experiences that it finds.
CREATE INDEX turn_reward_corrected ON rft.turn_reward (experience_id) WHERE reward <> reward_sampled;
COMMENT ON TABLE rft.turn_reward IS 'The reward of one turn alone, of experiences whose workflow recorded step_reward: a row for each turn of the experience. Only reward may be updated. Experiences of before schema 0003 get rows by `rft doctor --repair`, which reads their arrays; without rows they are trained on with the values of the array.';
COMMENT ON COLUMN rft.turn_reward.experience_id IS 'The experience that the turn belongs to.';
COMMENT ON COLUMN rft.turn_reward.turn IS 'The number of the turn in its rollout, from 0.';
COMMENT ON COLUMN rft.turn_reward.reward_sampled IS 'The reward that the workflow recorded, immutable; also in the array step_reward.';
COMMENT ON COLUMN rft.turn_reward.reward IS 'The reward with the latest label applied, which people read and set. The reward of the experience does not follow it.';

-- Which numbers the turns have is in the arrays, which `rft doctor` compares.
CREATE FUNCTION rft.check_turn_rewards() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off SET enable_material = off SET enable_mergejoin = off
AS $$
DECLARE
    wrong record;
BEGIN
    SELECT n.experience_id, n.num_rows, n.first_turn, e.num_turns, e.turn_index INTO wrong
    FROM (SELECT experience_id, count(*) AS num_rows, min(turn) AS first_turn FROM new_rows GROUP BY experience_id) n
    LEFT JOIN LATERAL (SELECT num_turns, turn_index FROM rft.experience WHERE experience_id = n.experience_id OFFSET 0) e ON true
    WHERE (n.num_rows, n.first_turn) IS DISTINCT FROM (e.num_turns, e.turn_index) LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'experience % has not the turns of the inserted rows: % from turn %', wrong.experience_id, wrong.num_rows, wrong.first_turn
            USING ERRCODE = 'check_violation', TABLE = 'turn_reward', SCHEMA = 'rft',
                DETAIL = CASE WHEN wrong.num_turns IS NULL THEN 'There is no such experience.'
                              ELSE format('It has num_turns = %s and turn_index = %s.', wrong.num_turns, wrong.turn_index) END,
                HINT = 'Insert the rows of all turns of an experience in one statement, after its own row.';
    END IF;
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION rft.check_turn_rewards() IS 'Trigger: refuses rewards of turns that an experience does not have, and of only some of its turns.';
CREATE TRIGGER turn_reward_turns AFTER INSERT ON rft.turn_reward REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION rft.check_turn_rewards();

-- A migration reads no arrays. Copies by forks share the segment of their origin, so segments and not experiences are compared.
ALTER TABLE rft.buffer ADD COLUMN turn_rewards_from bigint NOT NULL DEFAULT 0;
UPDATE rft.buffer SET turn_rewards_from = (
    SELECT coalesce(max(segment_id) + 1, 0) FROM (SELECT segment_id FROM rft.segment UNION ALL SELECT segment_id FROM rft.archived_segment) s);
COMMENT ON COLUMN rft.buffer.turn_rewards_from IS 'Experiences in segments of lower ids, which were written before schema 0003, may have rewards of turns in their arrays alone. `rft doctor --repair` adds their rows and sets it to 0.';

CREATE VIEW rft.v_corrected_turn AS
SELECT t.experience_id, t.turn, t.reward_sampled, t.reward FROM rft.turn_reward t WHERE t.reward <> t.reward_sampled;
COMMENT ON VIEW rft.v_corrected_turn IS 'Turns whose reward is another than the one that was sampled.';

-- Labels of experiences and of turns are one sequence: a verdict, a pinned run or an undo refers to both by one number.
ALTER TABLE rft.label ADD COLUMN turn integer;
COMMENT ON TABLE rft.label IS 'One change of a reward; append-only; the history of experience.reward and of turn_reward.reward.';
COMMENT ON COLUMN rft.label.turn IS 'The turn whose reward changed; NULL: the reward of the whole experience.';
COMMENT ON COLUMN rft.label.experience_id IS 'The experience whose reward, or the reward of one of whose turns, changed.';
COMMENT ON COLUMN rft.label.final IS 'Whether it made the reward final; false for a turn.';

CREATE OR REPLACE FUNCTION rft.refuse_fact_change() RETURNS trigger
LANGUAGE plpgsql
AS $$
BEGIN
    IF (TG_OP = 'UPDATE' OR TG_OP = 'DELETE' AND TG_TABLE_NAME = 'group_prompt') AND coalesce(current_setting('rft.purge', true), '') <> ''
        AND pg_has_role(current_user, (SELECT relowner FROM pg_class WHERE oid = TG_RELID), 'USAGE') THEN
        RETURN NULL;
    END IF;
    RAISE EXCEPTION 'rft.% holds facts: % is refused', TG_TABLE_NAME, TG_OP
        USING ERRCODE = 'integrity_constraint_violation',
              DETAIL = 'What was sampled never changes; of rft.experience only reward and reward_final may be updated, of rft.turn_reward only reward.',
              HINT = 'To correct a reward: UPDATE rft.experience SET reward = … WHERE experience_id = …; that of one turn: UPDATE rft.turn_reward SET reward = … WHERE experience_id = … AND turn = …. To exclude a task: UPDATE rft.task SET status = ''excluded''. To remove text and arrays for good: rft purge.';
END
$$;
CREATE TRIGGER turn_reward_facts
    BEFORE UPDATE OF experience_id, turn, reward_sampled ON rft.turn_reward FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_fact_change();
CREATE TRIGGER turn_reward_no_delete
    BEFORE DELETE OR TRUNCATE ON rft.turn_reward FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_fact_change();

-- By the names of triggers, these come before the labels.
CREATE TRIGGER archived_turn_reward_update AFTER UPDATE ON rft.turn_reward REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_archived_change('experience_id');
CREATE TRIGGER archived_turn_reward_insert AFTER INSERT ON rft.turn_reward REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_archived_change('experience_id');

-- Anyone may set rft.label_batch. In the batch of another user, labels would be undone with those of that user.
CREATE FUNCTION rft.own_label_batch(given bigint) RETURNS bigint
LANGUAGE plpgsql
AS $$
DECLARE
    batch bigint := coalesce(given, (SELECT * FROM rft.begin_label_batches(1)));
BEGIN
    IF NOT EXISTS (SELECT FROM rft.label_batch b WHERE b.label_batch_id = batch AND b.session_user_name = session_user) THEN
        RAISE EXCEPTION 'label batch % is not one that % began', batch, session_user
            USING ERRCODE = 'insufficient_privilege', HINT = 'Begin one: SELECT rft.begin_label_batches(1), or leave rft.label_batch unset.';
    END IF;
    RETURN batch;
END
$$;
COMMENT ON FUNCTION rft.own_label_batch(bigint) IS 'Returns the given batch of labels, or a new one without it; refuses a batch that another user began.';

-- Runs with the owner's rights, because no other role may write rft.label. A label is also an answer, so the reviews of its groups are
-- locked with them.
CREATE OR REPLACE FUNCTION rft.record_labels() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    given bigint := nullif(current_setting('rft.label_batch', true), '')::bigint;
    batch bigint;
    num_labels bigint;
    touched bigint[];
BEGIN
    SELECT array_agg(DISTINCT n.group_id) INTO touched
    FROM new_rows n JOIN old_rows o USING (experience_id)
    WHERE (n.reward, n.reward_final) IS DISTINCT FROM (o.reward, o.reward_final);
    IF touched IS NULL THEN
        RETURN NULL;
    END IF;
    -- Lock before the labels get their ids, so that within a group ids grow in the order in which labels commit. A verdict's label_cut
    -- then covers every label up to it.
    PERFORM rft.lock_groups_and_reviews(touched);
    batch := rft.own_label_batch(given);
    INSERT INTO rft.label (experience_id, old_value, new_value, author, source, reason, label_batch_id, final)
    SELECT n.experience_id, o.reward, n.reward,
           coalesce(nullif(current_setting('rft.author', true), ''), session_user),
           coalesce(nullif(current_setting('rft.label_source', true), ''), 'sql')::rft.label_source,
           nullif(current_setting('rft.reason', true), ''),
           batch, n.reward_final
    FROM new_rows n JOIN old_rows o USING (experience_id)
    WHERE (n.reward, n.reward_final) IS DISTINCT FROM (o.reward, o.reward_final);
    GET DIAGNOSTICS num_labels = ROW_COUNT;
    PERFORM rft.reopen_groups(touched);
    IF given IS NULL THEN  -- written by a person in SQL, who has not seen the id
        RAISE NOTICE 'label batch %: % changed', batch, num_labels USING HINT = format('rft label undo %s', batch);
    END IF;
    RETURN NULL;
END
$$;

-- The rows of turns that are updated, then groups and reviews: whatever else locks groups locks no row of a turn after them.
CREATE FUNCTION rft.record_turn_labels() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off SET enable_material = off SET enable_mergejoin = off
AS $$
DECLARE
    given bigint := nullif(current_setting('rft.label_batch', true), '')::bigint;
    batch bigint;
    num_labels bigint;
    touched bigint[];
BEGIN
    SELECT array_agg(DISTINCT e.group_id) INTO touched
    FROM (SELECT DISTINCT experience_id FROM new_rows n JOIN old_rows o USING (experience_id, turn) WHERE n.reward <> o.reward) c
    CROSS JOIN LATERAL (SELECT group_id FROM rft.experience WHERE experience_id = c.experience_id OFFSET 0) e;
    IF touched IS NULL THEN
        RETURN NULL;
    END IF;
    PERFORM rft.lock_groups_and_reviews(touched);  -- before the labels get their ids, see rft.record_labels
    batch := rft.own_label_batch(given);
    INSERT INTO rft.label (experience_id, turn, old_value, new_value, author, source, reason, label_batch_id)
    SELECT n.experience_id, n.turn, o.reward, n.reward,
           coalesce(nullif(current_setting('rft.author', true), ''), session_user),
           coalesce(nullif(current_setting('rft.label_source', true), ''), 'sql')::rft.label_source,
           nullif(current_setting('rft.reason', true), ''), batch
    FROM new_rows n JOIN old_rows o USING (experience_id, turn) WHERE n.reward <> o.reward
    ORDER BY n.experience_id, n.turn;
    GET DIAGNOSTICS num_labels = ROW_COUNT;
    PERFORM rft.reopen_groups(touched);
    IF given IS NULL THEN
        RAISE NOTICE 'label batch %: % changed', batch, num_labels USING HINT = format('rft label undo %s', batch);
    END IF;
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION rft.record_turn_labels() IS 'Trigger: writes the label rows of an UPDATE of rewards of turns and reopens the affected groups.';
CREATE TRIGGER turn_reward_labels
    AFTER UPDATE ON rft.turn_reward
    REFERENCING OLD TABLE AS old_rows NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION rft.record_turn_labels();
COMMENT ON FUNCTION rft.answer_by_label() IS 'Trigger: setting the reward of an experience, or of one of its turns, answers the open questions about it.';

CREATE OR REPLACE FUNCTION rft.reward_at(of_experience bigint, cut bigint) RETURNS double precision
LANGUAGE sql STABLE
AS $$
    SELECT CASE WHEN l.label_id IS NULL THEN e.reward ELSE l.old_value END
    FROM rft.experience e
    LEFT JOIN LATERAL (
        SELECT l.label_id, l.old_value FROM rft.label l
        WHERE l.experience_id = e.experience_id AND l.label_id > cut AND l.turn IS NULL
        ORDER BY l.label_id LIMIT 1) l ON true
    WHERE e.experience_id = of_experience
$$;

-- A rollout whose chats branched has several rows. It is found by its group, since experiences have no index on rollouts.
CREATE FUNCTION rft.label_rollout(of_rollout bigint, new_reward double precision, is_final boolean DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql
AS $$
DECLARE
    num_experiences bigint;
BEGIN
    UPDATE rft.experience SET reward = new_reward, reward_final = coalesce(is_final, reward_final)
    WHERE group_id = (SELECT group_id FROM rft.rollout WHERE rollout_id = of_rollout) AND rollout_id = of_rollout;
    GET DIAGNOSTICS num_experiences = ROW_COUNT;
    IF num_experiences = 0 THEN
        RAISE EXCEPTION 'rollout % has no experience whose reward could be set', of_rollout
            USING ERRCODE = 'no_data_found', HINT = 'rft.v_experience has the rollout_id of each experience.';
    END IF;
    RETURN num_experiences;
END
$$;
COMMENT ON FUNCTION rft.label_rollout IS 'Sets the reward of all experiences of a rollout in one statement, so in one batch of labels; returns their number. In statistics of tasks it is one trial, however many experiences there are. is_final: reward_final; NULL leaves it.';

-- rft.version_of_experience is in 0004_labels/05_purge.sql, since it reads annotations.
CREATE OR REPLACE FUNCTION rft.lock_purged(ids bigint[]) RETURNS TABLE (experience_id bigint, version text)
LANGUAGE plpgsql
AS $$
BEGIN
    -- A run is locked before its rows, as by an archive and the start of an attempt.
    PERFORM FROM rft.run r WHERE r.run_id IN (SELECT e.run_id FROM rft.experience e WHERE e.experience_id = ANY (ids)) ORDER BY r.run_id FOR SHARE;
    -- In the order in which a relabel locks them.
    PERFORM FROM rft.experience e WHERE e.experience_id = ANY (ids) ORDER BY e.experience_id FOR UPDATE;
    PERFORM rft.lock_groups_and_reviews(ARRAY(SELECT DISTINCT e.group_id FROM rft.experience e WHERE e.experience_id = ANY (ids)));
    -- A draw from a stored selection holds its run. Draws before this lock are visible to the following statements; later draws see the purge.
    PERFORM FROM rft.run r WHERE r.source_kind IS NOT NULL AND r.status <> 'finished' ORDER BY r.run_id FOR UPDATE;
    RETURN QUERY SELECT e.experience_id, rft.version_of_experience(e) FROM rft.experience e WHERE e.experience_id = ANY (ids);
END
$$;
