-- Relabelling by SQL, refusal of changes to facts, and folds that can be rebuilt.

CREATE FUNCTION rft.refuse_fact_change() RETURNS trigger
LANGUAGE plpgsql
AS $$
BEGIN
    RAISE EXCEPTION 'rft.% holds facts: % is refused', TG_TABLE_NAME, TG_OP
        USING ERRCODE = 'integrity_constraint_violation',
              DETAIL = 'What was sampled never changes; of rft.experience only reward and reward_final may be updated.',
              HINT = 'To correct a reward: UPDATE rft.experience SET reward = … WHERE experience_id = …. To exclude a task: UPDATE rft.task SET status = ''excluded''.';
END
$$;
COMMENT ON FUNCTION rft.refuse_fact_change() IS 'Trigger: facts are immutable; the error says what to do instead.';

CREATE TRIGGER experience_facts
    BEFORE UPDATE OF experience_id, run_id, group_id, rollout_id, turn_index, source, parent_id, prompt, response, messages,
        reward_sampled, reward_parts, metrics, policy_version_min, policy_version_max, num_prompt_tokens,
        num_response_tokens, finish_reason, segment_id, segment_row, created_at
    ON rft.experience FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_fact_change();
CREATE TRIGGER experience_no_delete
    BEFORE DELETE OR TRUNCATE ON rft.experience FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_fact_change();
CREATE TRIGGER label_append_only
    BEFORE UPDATE OR DELETE OR TRUNCATE ON rft.label FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_fact_change();
CREATE TRIGGER rollout_facts
    BEFORE UPDATE OR DELETE OR TRUNCATE ON rft.rollout FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_fact_change();

CREATE FUNCTION rft.note_history() RETURNS trigger
LANGUAGE plpgsql
AS $$
BEGIN
    INSERT INTO rft.attempt_history (history_id, attempt_id, last_step) VALUES (NEW.attempt_id, NEW.attempt_id, NULL);
    INSERT INTO rft.attempt_history (history_id, attempt_id, last_step)
    SELECT NEW.attempt_id, h.attempt_id, least(h.last_step, coalesce(c.trainer_step, 0))
    FROM rft.attempt_history h LEFT JOIN rft.checkpoint c ON c.checkpoint_id = NEW.from_checkpoint_id
    WHERE h.history_id = NEW.parent_attempt_id;
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION rft.note_history() IS 'Writes the path of a new attempt: that of its parent, up to the checkpoint it goes on from.';
CREATE TRIGGER attempt_history AFTER INSERT ON rft.run_attempt FOR EACH ROW EXECUTE FUNCTION rft.note_history();

CREATE VIEW rft.v_history AS SELECT history_id, attempt_id, last_step FROM rft.attempt_history;
COMMENT ON VIEW rft.v_history IS 'Every attempt with the attempts on its path: the steps of `attempt_id` up to `last_step` (NULL: all) belong to the history of `history_id`.';

-- The groups a label touches are reopened unless this run's present history has already drawn them: their verdicts are
-- stale, so they leave the trainer's worklist and go back to the pipeline's. A verdict being committed at the same moment
-- waits for the lock on rollout_group (or we for it), a draw for the one on worklist. Whoever locks both locks
-- rollout_group first, in the order of its keys.
CREATE FUNCTION rft.reopen_groups(touched bigint[]) RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
    PERFORM FROM rft.rollout_group WHERE group_id = ANY (touched) ORDER BY group_id FOR UPDATE;

    UPDATE rft.worklist w SET available = false
    FROM rft.rollout_group g
    WHERE g.group_id = ANY (touched) AND w.consumer = 'trainer/' || g.run_id AND w.item_kind = 'group' AND w.item_id = g.group_id
      AND w.available;

    WITH open AS (
        UPDATE rft.rollout_group g
        SET status = 'sealed', trainable = true, closed_reason = NULL
        FROM rft.run r
        WHERE g.group_id = ANY (touched) AND r.run_id = g.run_id AND g.status IN ('sealed', 'ready')
          AND NOT EXISTS (
              SELECT FROM rft.draw d
              JOIN rft.v_history h ON h.history_id = r.current_attempt_id AND h.attempt_id = d.attempt_id
                  AND (h.last_step IS NULL OR d.trainer_step <= h.last_step)
              WHERE d.item_kind = 'group' AND d.item_id = g.group_id)
        RETURNING g.group_id, g.run_id, g.explore_step, g.ordinal
    )
    INSERT INTO rft.worklist AS w (consumer, item_kind, item_id, sort_key)
    SELECT 'pipeline/' || run_id, 'group', group_id, explore_step::bigint << 32 | ordinal FROM open
    ON CONFLICT (consumer, item_kind, item_id) DO UPDATE SET available = true, claimed_by = NULL, lease_until = NULL;

    PERFORM pg_notify('rft_sealed', '');
END
$$;
COMMENT ON FUNCTION rft.reopen_groups(bigint[]) IS 'Makes the verdicts of groups stale: the pipeline decides again before they can be drawn.';

CREATE FUNCTION rft.record_labels() RETURNS trigger
LANGUAGE plpgsql
AS $$
DECLARE
    batch bigint := nullif(current_setting('rft.label_batch', true), '')::bigint;
    touched bigint[];
BEGIN
    SELECT array_agg(DISTINCT n.group_id) INTO touched
    FROM new_rows n JOIN old_rows o USING (experience_id)
    WHERE (n.reward, n.reward_final) IS DISTINCT FROM (o.reward, o.reward_final);
    IF touched IS NULL THEN
        RETURN NULL;
    END IF;
    -- Before the labels get their ids, so that within a group ids grow in the order in which labels commit: a verdict's
    -- label_cut then covers every label up to it.
    PERFORM FROM rft.rollout_group WHERE group_id = ANY (touched) ORDER BY group_id FOR UPDATE;
    batch := coalesce(batch, nextval('rft.label_batch_id_seq'));
    INSERT INTO rft.label (experience_id, field, old_value, new_value, author, source, reason, label_batch_id, final)
    SELECT n.experience_id, 'reward', o.reward, n.reward,
           coalesce(nullif(current_setting('rft.author', true), ''), session_user),
           coalesce(nullif(current_setting('rft.label_source', true), ''), 'sql')::rft.label_source,
           nullif(current_setting('rft.reason', true), ''),
           batch, n.reward_final
    FROM new_rows n JOIN old_rows o USING (experience_id)
    WHERE (n.reward, n.reward_final) IS DISTINCT FROM (o.reward, o.reward_final);
    PERFORM rft.reopen_groups(touched);
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION rft.record_labels() IS 'Trigger: writes the label rows of an UPDATE of rewards and reopens the groups it touches.';

CREATE TRIGGER experience_labels
    AFTER UPDATE ON rft.experience
    REFERENCING OLD TABLE AS old_rows NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION rft.record_labels();

CREATE FUNCTION rft.rebuild_task_stat(of_run bigint) RETURNS bigint
LANGUAGE sql
AS $$
    WITH fold AS (
        SELECT task_id, 1 + sum(successes) AS alpha, 1 + sum(trials - successes) AS beta,
               count(*) FILTER (WHERE kind = 'explicit') AS attempts, sum(successes) / nullif(sum(trials), 0) AS mean_reward
        FROM rft.task_observation WHERE run_id = of_run GROUP BY task_id
    ), written AS (
        INSERT INTO rft.task_stat AS s (run_id, task_id, alpha, beta, attempts, mean_reward)
        SELECT of_run, task_id, alpha, beta, attempts, mean_reward FROM fold
        ON CONFLICT (run_id, task_id) DO UPDATE
        SET alpha = excluded.alpha, beta = excluded.beta, attempts = excluded.attempts, mean_reward = excluded.mean_reward
        RETURNING 1
    )
    SELECT count(*) FROM written
$$;
COMMENT ON FUNCTION rft.rebuild_task_stat(bigint) IS 'Folds a run''s observations into task_stat again; returns the number of tasks written.';

-- The statements of one draw in one round trip. Locks: the run's row in share mode (a take-over waits for us), then groups that
-- age out, then the worklist items picked; those that a relabel holds at this moment are passed over.
CREATE FUNCTION rft.draw_groups(
    of_run bigint, of_attempt bigint, step integer, wanted integer, staleness_limit integer, refill_limit integer,
    OUT outcome text, OUT reason text)
LANGUAGE plpgsql
AS $$
DECLARE
    queue CONSTANT text := 'trainer/' || of_run;
    r rft.run;
    picked bigint[];
    found_before integer;
    waiting integer;
    planned record;
BEGIN
    SELECT * INTO r FROM rft.run WHERE run_id = of_run AND current_attempt_id = of_attempt FOR SHARE;
    IF NOT FOUND THEN
        outcome := 'fenced';
        RETURN;
    END IF;
    outcome := 'drawn';
    SELECT count(DISTINCT item_id) INTO found_before FROM rft.draw WHERE attempt_id = of_attempt AND trainer_step = step;
    IF found_before > 0 THEN
        IF found_before < wanted THEN
            reason := format('%s of %s groups were drawn for this step before', found_before, wanted);
        END IF;
        RETURN;
    END IF;

    -- Groups too old for this step leave the worklist; their place goes back to the planner.
    WITH locked AS (
        SELECT g.group_id FROM rft.worklist w JOIN rft.rollout_group g ON g.group_id = w.item_id
        WHERE w.consumer = queue AND w.item_kind = 'group' AND w.available AND w.policy_step < step - 1 - staleness_limit
        ORDER BY g.group_id FOR UPDATE OF g SKIP LOCKED),
    old AS (
        UPDATE rft.worklist w SET available = false FROM locked l
        WHERE w.consumer = queue AND w.item_kind = 'group' AND w.item_id = l.group_id AND w.available
        RETURNING w.item_id, w.policy_step)
    UPDATE rft.rollout_group g
    SET trainable = false,
        closed_reason = format('aged out: staleness %s at step %s, max_staleness %s', step - 1 - o.policy_step, step, staleness_limit)
    FROM old o WHERE g.group_id = o.item_id;
    IF FOUND THEN
        PERFORM pg_notify('rft_ready', '');
    END IF;

    SELECT array_agg(item_id) INTO picked FROM (
        SELECT item_id FROM rft.worklist
        WHERE consumer = queue AND available AND sort_key < step::bigint << 32 AND policy_step >= step - 1 - staleness_limit
        ORDER BY sort_key LIMIT wanted FOR UPDATE SKIP LOCKED) p;
    IF coalesce(cardinality(picked), 0) < wanted THEN
        SELECT count(*) INTO waiting FROM (
            SELECT FROM rft.worklist WHERE consumer = queue AND available AND sort_key < step::bigint << 32 LIMIT wanted) w;
        SELECT count(*) FILTER (WHERE g.trainable AND g.status IN ('planned', 'claimed', 'sealed') AND
                                      (r.mode = 'train' OR g.explore_step < step)) AS undecided,
               count(*) FILTER (WHERE g.explore_step = step - 1 AND NOT g.is_refill) AS base,
               count(*) FILTER (WHERE g.explore_step = step - 1 AND g.is_refill) AS refills
        INTO planned FROM rft.rollout_group g
        WHERE g.run_id = of_run AND (g.explore_step = step - 1 OR g.status IN ('planned', 'claimed', 'sealed'));
        IF waiting > coalesce(cardinality(picked), 0) OR planned.undecided > 0
            OR (r.mode <> 'train' AND (planned.base < wanted OR planned.refills < refill_limit)) THEN
            outcome := 'not yet';
            RETURN;
        END IF;
        reason := format('%s of %s groups survived: ', waiting, wanted)
            || CASE WHEN r.mode = 'train' THEN 'the stored experiences are used up'
               ELSE format('%s planned and %s refilled, explorer.max_refill is used up', planned.base, planned.refills) END;
    END IF;

    -- Every experience drawn is noted with its reward as it stands.
    WITH taken AS (
        UPDATE rft.worklist w SET available = false
        WHERE w.consumer = queue AND w.item_kind = 'group' AND w.item_id = ANY (picked)
        RETURNING w.item_id, w.sort_key, w.policy_step)
    INSERT INTO rft.draw (attempt_id, trainer_step, slot, item_kind, item_id, experience_id, reward_used, staleness)
    SELECT of_attempt, step, row_number() OVER (ORDER BY p.sort_key, o.rollout_index, e.turn_index) - 1, 'group', p.item_id,
           e.experience_id, CASE WHEN e.reward_final THEN e.reward ELSE coalesce(v.reward, e.reward) END,
           CASE WHEN p.policy_step = 2147483647 THEN 0 ELSE step - 1 - p.policy_step END
    FROM taken p
    JOIN rft.experience e ON e.group_id = p.item_id
    JOIN rft.rollout o USING (rollout_id)
    LEFT JOIN LATERAL (
        SELECT v.kept, v.reward FROM rft.verdict v
        WHERE v.experience_id = e.experience_id AND v.pipeline_version = r.pipeline_version
        ORDER BY v.verdict_id DESC LIMIT 1) v ON true
    WHERE coalesce(v.kept, r.pipeline_version = 'none');
END
$$;
COMMENT ON FUNCTION rft.draw_groups IS 'Draws whole ready groups for a trainer step, first in first out. outcome: drawn (reason says why a batch is short), not yet, or fenced (the attempt no longer holds the run).';
