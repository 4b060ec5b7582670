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

CREATE VIEW rft.v_history AS
WITH RECURSIVE path AS (
    SELECT a.attempt_id AS history_id, a.attempt_id, NULL::integer AS last_step, a.parent_attempt_id, a.from_checkpoint_id
    FROM rft.run_attempt a
    UNION ALL
    SELECT p.history_id, a.attempt_id,
           least(coalesce(p.last_step, 2147483647), coalesce(c.trainer_step, 0)),
           a.parent_attempt_id, a.from_checkpoint_id
    FROM path p
    JOIN rft.run_attempt a ON a.attempt_id = p.parent_attempt_id
    LEFT JOIN rft.checkpoint c ON c.checkpoint_id = p.from_checkpoint_id
)
SELECT history_id, attempt_id, last_step FROM path;
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
