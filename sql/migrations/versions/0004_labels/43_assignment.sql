-- Claiming questions. All functions here have the owner's rights, because people may write neither questions nor assignments; each acts for session_user
-- alone, and reads no setting.

CREATE FUNCTION rft.question_lease() RETURNS interval LANGUAGE sql IMMUTABLE AS $$ SELECT interval '5 min' $$;
COMMENT ON FUNCTION rft.question_lease() IS 'How long a claimed question stays with an account that does not renew it.';

-- With one snapshot for the whole transaction, the count of places would be that of before the locks.
CREATE FUNCTION rft.need_read_committed() RETURNS void
LANGUAGE plpgsql STABLE
AS $$
BEGIN
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        RAISE EXCEPTION 'questions are not leased in a transaction that is %', current_setting('transaction_isolation')
            USING ERRCODE = 'invalid_transaction_state', HINT = 'Use READ COMMITTED, which is the default: more accounts than wanted would get a question.';
    END IF;
END
$$;
COMMENT ON FUNCTION rft.need_read_committed() IS 'Refuses transactions that do not see the leases of others who committed meanwhile.';

CREATE FUNCTION rft.lease_questions(ids bigint[]) RETURNS integer
LANGUAGE plpgsql
AS $$
DECLARE
    num integer;
BEGIN
    -- A statement of its own: it sees the leases of those who held the locks before.
    INSERT INTO rft.assignment AS a (question_id, session_user_name, state, leased_until)
    SELECT q.question_id, session_user, 'leased', rft.clock() + rft.question_lease()
    FROM rft.question q
    WHERE q.question_id = ANY (ids) AND q.deadline > rft.clock()
      AND (q.is_gold OR q.is_open AND q.num_answers + (
          SELECT count(*) FROM rft.assignment o
          WHERE o.question_id = q.question_id AND o.state = 'leased' AND o.leased_until > rft.clock() AND o.session_user_name <> session_user) < q.wanted)
    ON CONFLICT (question_id, session_user_name) DO UPDATE SET state = 'leased', leased_until = excluded.leased_until, since = rft.clock()
    WHERE a.state <> 'answered';
    GET DIAGNOSTICS num = ROW_COUNT;
    RETURN num;
END
$$;
COMMENT ON FUNCTION rft.lease_questions(bigint[]) IS 'Leases questions that the caller has locked, as far as places are free; returns their number. Called by rft.claim_questions.';

CREATE FUNCTION rft.claim_questions(of_queue text, num integer DEFAULT 1, of_run bigint DEFAULT NULL, holding bigint[] DEFAULT '{}')
RETURNS TABLE (question_id bigint, review_id bigint, target_id bigint, leased_until timestamptz)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off SET enable_material = off SET enable_mergejoin = off
    -- The queue is read in the order of its index, up to the questions that are wanted. Otherwise a plan of before the last ANALYZE may look at all.
    SET enable_sort = off SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
DECLARE
    most CONSTANT integer := 50;  -- so that no account reserves a whole queue
    free integer;
    found_ids bigint[];
    tried bigint[] := holding;
    is_limited boolean := EXISTS (SELECT FROM rft.label_permission p WHERE p.account = session_user);
BEGIN
    PERFORM rft.need_read_committed();
    IF num IS NULL OR num < 0 THEN
        RAISE EXCEPTION 'the number of questions to claim is %; it must be 0 or more', coalesce(num::text, 'NULL')
            USING ERRCODE = 'invalid_parameter_value', HINT = format('Claim up to %s; nothing was leased.', most);
    END IF;
    UPDATE rft.assignment a SET leased_until = rft.clock() + rft.question_lease()
    WHERE a.session_user_name = session_user AND a.state = 'leased' AND a.leased_until > rft.clock() AND a.question_id = ANY (holding);
    free := least(num, most) - (
        SELECT count(*) FROM rft.assignment a JOIN rft.question q USING (question_id)
        WHERE a.session_user_name = session_user AND a.state = 'leased' AND a.leased_until > rft.clock() AND a.question_id <> ALL (holding)
          AND q.queue = of_queue AND (q.is_open OR q.is_gold) AND (of_run IS NULL OR q.run_id = of_run));
    free := least(free, most - (SELECT count(*) FROM rft.assignment a WHERE a.session_user_name = session_user AND a.state = 'leased' AND a.leased_until > rft.clock()));
    FOR i IN 1 .. free LOOP  -- at the rate of the kind, a place goes to a question with a known answer
        free := free - rft.lease_gold(of_queue, of_run, holding, is_limited);
    END LOOP;
    WHILE free > 0 LOOP
        found_ids := ARRAY(
            SELECT q.question_id FROM rft.question q
            WHERE q.queue = of_queue AND q.is_open AND q.deadline > rft.clock() AND q.question_id <> ALL (tried) AND (of_run IS NULL OR q.run_id = of_run)
              AND NOT EXISTS (SELECT FROM rft.assignment a WHERE a.question_id = q.question_id AND a.session_user_name = session_user
                              AND (a.state <> 'leased' OR a.leased_until > rft.clock()))
              AND rft.is_claimable(q, is_limited)
            ORDER BY q.priority DESC, q.deadline, q.question_id LIMIT free FOR NO KEY UPDATE SKIP LOCKED);
        IF found_ids = '{}' THEN  -- then those that the account has skipped, the oldest first
            found_ids := ARRAY(
                SELECT q.question_id FROM rft.assignment a JOIN rft.question q USING (question_id)
                WHERE a.session_user_name = session_user AND a.state = 'skipped' AND q.queue = of_queue AND q.deadline > rft.clock()
                  AND q.question_id <> ALL (tried) AND (of_run IS NULL OR q.run_id = of_run)
                  AND CASE WHEN q.is_gold THEN rft.is_answerable(q, is_limited) ELSE q.is_open AND rft.is_claimable(q, is_limited) END
                ORDER BY a.since, q.question_id LIMIT free FOR NO KEY UPDATE OF q SKIP LOCKED);
        END IF;
        EXIT WHEN found_ids = '{}';
        tried := tried || found_ids;
        free := free - rft.lease_questions(found_ids);
    END LOOP;
    RETURN QUERY
    SELECT q.question_id, q.review_id, q.target_id, a.leased_until FROM rft.assignment a JOIN rft.question q USING (question_id)
    WHERE a.session_user_name = session_user AND a.state = 'leased' AND a.leased_until > rft.clock() AND a.question_id <> ALL (holding)
      AND q.queue = of_queue AND (q.is_open OR q.is_gold) AND (of_run IS NULL OR q.run_id = of_run)
    ORDER BY q.priority DESC, q.deadline, q.question_id LIMIT num;
END
$$;
COMMENT ON FUNCTION rft.claim_questions(text, integer, bigint, bigint[]) IS 'Leases the next questions of a queue (a kind, or an empty text for reviews) for the session''s account and renews those that it holds; returns its leases without the held ones. Never more leases and answers than a question wants; skipped ones come last. Owner''s rights, to write assignments.';

CREATE FUNCTION rft.is_answerable(q rft.question, is_limited boolean) RETURNS boolean
LANGUAGE sql STABLE
    SET enable_seqscan = off
AS $$
    SELECT (NOT is_limited OR rft.may_label(coalesce(q.kind, 'reward'), q.run_id, q.taskset))
        AND (q.kind IS NULL OR NOT rft.has_standing(q.kind, q.target_id, session_user))
        AND (q.review_id IS NULL OR EXISTS (SELECT FROM rft.rollout_group g WHERE g.group_id = q.group_id AND g.status = 'sealed' AND g.left_by IS NULL))
        AND (q.run_id IS NULL OR NOT EXISTS (SELECT FROM rft.archive x WHERE x.run_id = q.run_id AND x.status = 'archived'))
        AND (q.group_id IS NULL OR NOT EXISTS (SELECT FROM rft.experience e JOIN rft.purged_experience x USING (experience_id) WHERE e.group_id = q.group_id))
$$;
COMMENT ON FUNCTION rft.is_answerable(rft.question, boolean) IS 'Returns whether the session''s account may answer a question now: it is permitted to and has not answered, and the target is neither purged nor archived.';

CREATE FUNCTION rft.is_claimable(q rft.question, is_limited boolean) RETURNS boolean
LANGUAGE sql STABLE
    SET enable_seqscan = off
AS $$
    SELECT rft.is_answerable(q, is_limited)
        AND q.num_answers + (SELECT count(*) FROM rft.assignment o
                             WHERE o.question_id = q.question_id AND o.state = 'leased' AND o.leased_until > rft.clock() AND o.session_user_name <> session_user) < q.wanted
$$;
COMMENT ON FUNCTION rft.is_claimable(rft.question, boolean) IS 'Returns whether the session''s account may answer an open question now. Called by rft.claim_questions.';

CREATE FUNCTION rft.renew_questions(ids bigint[]) RETURNS SETOF bigint
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    UPDATE rft.assignment a SET leased_until = rft.clock() + rft.question_lease()
    WHERE a.session_user_name = session_user AND a.state = 'leased' AND a.leased_until > rft.clock() AND a.question_id = ANY (ids) RETURNING a.question_id
$$;
COMMENT ON FUNCTION rft.renew_questions(bigint[]) IS 'Extends the session account''s leases of questions that an open page shows; returns those that it still holds. Owner''s rights, to write assignments.';

CREATE FUNCTION rft.release_questions(ids bigint[]) RETURNS integer
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    WITH done AS (
        UPDATE rft.assignment a SET leased_until = rft.clock()
        WHERE a.session_user_name = session_user AND a.state = 'leased' AND a.leased_until > rft.clock() AND a.question_id = ANY (ids) RETURNING 1)
    SELECT count(*)::integer FROM done
$$;
COMMENT ON FUNCTION rft.release_questions(bigint[]) IS 'Ends the session account''s leases, so that others can claim the questions. Owner''s rights, to write assignments.';

CREATE FUNCTION rft.skip_question(id bigint) RETURNS boolean
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    WITH done AS (
        UPDATE rft.assignment a SET state = 'skipped', leased_until = rft.clock(), since = rft.clock()
        WHERE a.session_user_name = session_user AND a.question_id = id AND a.state = 'leased' RETURNING 1)
    SELECT count(*) > 0 FROM done
$$;
COMMENT ON FUNCTION rft.skip_question(bigint) IS 'Moves a question to the end of the session account''s queue; returns whether it did. Its place is free for others. Owner''s rights, to write assignments.';

CREATE FUNCTION rft.unskip_question(id bigint) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    asked rft.question;
BEGIN
    PERFORM rft.need_read_committed();
    SELECT * INTO asked FROM rft.question WHERE question_id = id FOR NO KEY UPDATE;
    UPDATE rft.assignment a
    SET state = 'leased', leased_until = rft.clock() + CASE WHEN asked.is_gold THEN rft.question_lease() ELSE interval '0' END, since = rft.clock()
    WHERE a.session_user_name = session_user AND a.question_id = id AND a.state = 'skipped';
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    IF rft.is_claimable(asked, EXISTS (SELECT FROM rft.label_permission p WHERE p.account = session_user)) THEN
        PERFORM rft.lease_questions(ARRAY[id]);
    END IF;
    RETURN true;
END
$$;
COMMENT ON FUNCTION rft.unskip_question(bigint) IS 'Moves a skipped question back to its place in the session account''s queue, and leases it if a place is free; returns whether it was moved. Owner''s rights, to write assignments.';

CREATE FUNCTION rft.skipped_questions(of_queue text, of_run bigint DEFAULT NULL) RETURNS TABLE (question_id bigint, target_id bigint, since timestamptz)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT q.question_id, q.target_id, a.since FROM rft.assignment a JOIN rft.question q USING (question_id)
    WHERE a.session_user_name = session_user AND a.state = 'skipped' AND q.queue = of_queue AND (q.is_open OR q.is_gold) AND q.deadline > rft.clock()
      AND (of_run IS NULL OR q.run_id = of_run)
    ORDER BY a.since DESC, q.question_id;
END
$$;
COMMENT ON FUNCTION rft.skipped_questions(text, bigint) IS 'Returns the questions of a queue that the session''s account has skipped, the newest first. Owner''s rights, since labellers see no questions; it tells of no others.';

CREATE FUNCTION rft.has_questions(of_queue text) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$ SELECT EXISTS (SELECT FROM rft.question q WHERE q.queue = of_queue) $$;
COMMENT ON FUNCTION rft.has_questions(text) IS 'Returns whether people were ever asked in a queue: then its questions are claimed. Owner''s rights, since labellers see no questions; it tells nothing else.';
