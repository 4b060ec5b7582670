-- Experiences of several turns: a row is a rollout, or a branch of one. See docs/decisions/0047.

CREATE TYPE rft.fork AS ENUM ('branch', 'history', 'template', 'separate');
COMMENT ON TYPE rft.fork IS 'Why a sequence begins anew in its rollout. branch: the workflow asked again after a chat that has an answer; history: the workflow changed or left out messages of the chat; template: the chat template renders the earlier chat differently when new messages follow; separate: the chat has nothing in common with an earlier one.';

-- Experiences of before are one turn. Which of their response tokens count is in their arrays alone, so all are counted.
ALTER TABLE rft.experience ADD COLUMN num_trained_tokens integer CHECK (num_trained_tokens >= 0);
ALTER TABLE rft.experience DISABLE TRIGGER USER;
UPDATE rft.experience SET num_trained_tokens = num_response_tokens;
ALTER TABLE rft.experience ENABLE TRIGGER USER;
ALTER TABLE rft.experience
    ALTER COLUMN num_trained_tokens SET NOT NULL,
    ADD COLUMN num_turns integer NOT NULL DEFAULT 1 CHECK (num_turns >= 1),
    ADD COLUMN fork rft.fork;
COMMENT ON TABLE rft.experience IS 'One trainable sequence: a rollout of one or several turns, or a branch of one. Facts are immutable; reward and reward_final are opinions and may be updated.';
COMMENT ON COLUMN rft.experience.rollout_id IS 'The rollout that it is, or is a branch of.';
COMMENT ON COLUMN rft.experience.turn_index IS 'The number of its first turn in the rollout, from 0.';
COMMENT ON COLUMN rft.experience.response IS 'What follows the prompt, as text: the answer, or the answers with what the environment wrote between them. Without the special tokens that begin, end or fill a text.';
COMMENT ON COLUMN rft.experience.num_response_tokens IS 'Number of tokens after the prompt: answers, and what the environment wrote between them.';
COMMENT ON COLUMN rft.experience.num_trained_tokens IS 'Number of response tokens that are trained on: those of the answers. All response tokens for experiences of before schema 0002.';
COMMENT ON COLUMN rft.experience.num_turns IS 'Number of turns whose answers it trains. The array turns has the tokens of each, if there are several.';
COMMENT ON COLUMN rft.experience.fork IS 'Why it begins anew instead of extending an earlier sequence of its rollout; NULL if it does not.';

DROP TRIGGER experience_facts ON rft.experience;
CREATE TRIGGER experience_facts
    BEFORE UPDATE OF experience_id, run_id, group_id, rollout_id, turn_index, source, parent_id, prompt_digest, response, response_messages,
        reward_sampled, reward_parts, metrics, policy_version_min, policy_version_max, num_prompt_tokens,
        num_response_tokens, num_trained_tokens, num_turns, fork, finish_reason, segment_id, segment_row, created_at
    ON rft.experience FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_fact_change();

COMMENT ON COLUMN rft.evaluation_answer.response IS 'The model''s answer, of several the last one.';
COMMENT ON COLUMN rft.evaluation_answer.num_response_tokens IS 'Number of tokens of all answers of the rollout''s last experience.';

-- A rollout counts with the mean success of its sequences; a reward that one of them gains or loses is that share of a trial. Responses that a
-- stage wrote are no evidence about the policy. Rows are found by their keys, whatever the tables contained when this was planned.
CREATE OR REPLACE FUNCTION rft.correct_observations() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off SET enable_material = off SET enable_mergejoin = off
AS $$
BEGIN
    -- Labellers run this, and what they have set must not keep their corrections out of the fold.
    PERFORM set_config('rft.folding', '', true);
    INSERT INTO rft.task_observation (run_id, attempt_id, ordinal, task_id, kind, successes, trials, author, session_user_name, reason)
    SELECT g.run_id, g.attempt_id, g.ordinal, g.task_id, 'correction', d.successes, d.trials,
           coalesce(nullif(current_setting('rft.author', true), ''), session_user), session_user,
           nullif(current_setting('rft.reason', true), '')
    FROM (
        SELECT c.group_id, sum(c.successes / s.num_sequences) AS successes, sum(c.trials / s.num_sequences) AS trials
        FROM (
            SELECT n.group_id, n.rollout_id,
                   coalesce(least(greatest(n.reward, 0), 1), 0) - coalesce(least(greatest(o.reward, 0), 1), 0) AS successes,
                   ((n.reward IS NOT NULL)::integer - (o.reward IS NOT NULL)::integer)::double precision AS trials
            FROM new_rows n JOIN old_rows o USING (experience_id) WHERE n.reward IS DISTINCT FROM o.reward) c
        CROSS JOIN LATERAL (SELECT count(*) AS num_sequences FROM rft.experience WHERE group_id = c.group_id AND rollout_id = c.rollout_id OFFSET 0) s
        WHERE c.successes <> 0 OR c.trials <> 0
        GROUP BY c.group_id) d
    CROSS JOIN LATERAL (
        SELECT run_id, attempt_id, ordinal, task_id FROM rft.rollout_group
        WHERE group_id = d.group_id AND left_by IS NULL AND source <> 'synthesis' OFFSET 0) g
    WHERE d.successes <> 0 OR d.trials <> 0
    ORDER BY g.run_id, g.task_id;
    RETURN NULL;
END
$$;

-- CREATE OR REPLACE cannot add a column of the result.
DROP FUNCTION rft.formula_columns(bigint, bigint[], double precision[], integer[]);
CREATE FUNCTION rft.formula_columns(of_run bigint, of_items bigint[], of_priorities double precision[], of_times integer[])
RETURNS TABLE (
    group_id bigint, priority double precision, mean_reward double precision, std_reward double precision, min_reward double precision,
    max_reward double precision, num_experiences double precision, num_response_tokens double precision, num_trained_tokens double precision,
    num_labels double precision, times_sampled double precision, explore_step double precision, policy_step double precision, task_pass_rate double precision,
    task_attempts double precision)
LANGUAGE sql STABLE
AS $$
    SELECT i.item_id, i.priority, e.mean_reward, coalesce(e.std_reward, 0), e.min_reward, e.max_reward, e.num_experiences,
           e.num_response_tokens, e.num_trained_tokens, e.num_labels, i.times, g.explore_step, e.policy_step, coalesce(s.alpha / (s.alpha + s.beta), 0.5),
           coalesce(s.attempts, 0)
    FROM unnest(of_items, of_priorities, of_times) AS i (item_id, priority, times)
    CROSS JOIN LATERAL (SELECT run_id, task_id, explore_step FROM rft.rollout_group WHERE group_id = i.item_id OFFSET 0) g
    JOIN rft.run r ON r.run_id = g.run_id
    LEFT JOIN rft.task_stat s ON s.run_id = g.run_id AND s.task_id = g.task_id
    LEFT JOIN LATERAL (
        SELECT avg(t.reward) AS mean_reward, stddev_pop(t.reward) AS std_reward, min(t.reward) AS min_reward, max(t.reward) AS max_reward,
               count(*)::double precision AS num_experiences, avg(x.num_response_tokens)::double precision AS num_response_tokens,
               avg(x.num_trained_tokens)::double precision AS num_trained_tokens,
               sum(t.labels)::double precision AS num_labels, min(t.step)::double precision AS policy_step
        FROM rft.experience x
        CROSS JOIN LATERAL (
            SELECT (SELECT count(*) FROM rft.label l WHERE l.experience_id = x.experience_id) AS labels,
                   (SELECT p.trainer_step FROM rft.policy_version p WHERE p.policy_version_id = x.policy_version_min) AS step,
                   CASE WHEN x.reward_final THEN x.reward ELSE coalesce((
                       SELECT v.reward FROM rft.verdict v WHERE v.experience_id = x.experience_id AND v.newest_of = r.pipeline_version), x.reward) END AS reward) t
        WHERE x.group_id = i.item_id) e ON true
    WHERE g.run_id = of_run
$$;
COMMENT ON FUNCTION rft.formula_columns IS 'Returns the values of a group that a priority formula may use. priority: set by pipeline or trainer; rewards: of its experiences, as currently used for training; num_response_tokens, num_trained_tokens: mean; num_labels: number of relabels; policy_step: trainer step of the oldest policy, NULL if no policy sampled; task_pass_rate, task_attempts: the run''s statistics of its task.';

-- New columns of a view that is replaced stand at its end.
CREATE OR REPLACE VIEW rft.v_experience AS
SELECT e.experience_id, r.name AS run, e.run_id, t.taskset, t.task_key, e.group_id, g.explore_step, ro.rollout_index, e.turn_index,
       ro.outcome, gp.prompt, e.response, t.payload ->> 'answer' AS answer,
       e.reward_sampled, e.reward, v.reward AS reward_shaped,
       CASE WHEN e.reward_final THEN e.reward ELSE coalesce(v.reward, e.reward) END AS reward_trained, b.reward AS baseline_reward,
       e.reward_parts, e.metrics, e.finish_reason, e.num_prompt_tokens, e.num_response_tokens,
       p.trainer_step AS policy_step, e.policy_version_min, e.policy_version_max,
       rft.state(g.status, u.times_sampled, v.kept, g.trainable) AS state,
       v.stage AS dropped_by, coalesce(v.reason, g.closed_reason) AS dropped_because,
       coalesce(u.times_sampled, 0)::bigint AS times_sampled, d.steps AS trainer_steps, l.num_labels,
       e.source, rft.chat(gp.messages, e.response_messages, e.response) AS messages, e.parent_id, e.segment_id, e.segment_row, e.created_at, e.response_hash, e.num_trained_tokens, e.num_turns, e.fork
FROM rft.experience e
JOIN rft.run r USING (run_id)
JOIN rft.rollout_group g USING (group_id)
LEFT JOIN rft.rollout ro ON ro.rollout_id = e.rollout_id
LEFT JOIN rft.task t ON t.task_id = g.task_id
LEFT JOIN rft.group_prompt gp ON gp.group_id = e.group_id AND gp.prompt_digest = e.prompt_digest
LEFT JOIN rft.group_baseline b ON b.group_id = e.group_id
LEFT JOIN rft.policy_version p ON p.policy_version_id = e.policy_version_min
LEFT JOIN rft.verdict v ON v.experience_id = e.experience_id AND v.newest_of = g.decided_by
LEFT JOIN rft.draw u ON u.newest_of = e.experience_id
LEFT JOIN LATERAL (
    SELECT array_agg(d.trainer_step ORDER BY d.trainer_step) AS steps
    FROM (SELECT * FROM rft.draw WHERE experience_id = e.experience_id OFFSET 0) d
    JOIN rft.v_attempt_history h ON h.history_id = r.current_attempt_id AND h.attempt_id = d.attempt_id
        AND (h.last_step IS NULL OR d.trainer_step <= h.last_step)) d ON true
LEFT JOIN LATERAL (
    SELECT count(*) AS num_labels FROM rft.label l WHERE l.experience_id = e.experience_id) l ON true;

CREATE OR REPLACE VIEW rft.v_pair AS
SELECT p.pair_id, r.name AS run, c.run_id, c.group_id, t.taskset, t.task_key, p.source, p.author, p.session_user_name, p.chosen_id, p.rejected_id,
       gp.prompt, c.response AS chosen, j.response AS rejected, c.reward AS chosen_reward, j.reward AS rejected_reward,
       CASE p.source WHEN 'human' THEN p.margin ELSE c.reward - j.reward END AS margin,
       (p.source = 'human' OR coalesce(c.reward > j.reward, false))
           AND NOT EXISTS (SELECT FROM rft.purged_experience x WHERE x.experience_id IN (p.chosen_id, p.rejected_id)) AS stands,
       c.num_trained_tokens AS chosen_tokens, j.num_trained_tokens AS rejected_tokens,
       c.finish_reason AS chosen_finish_reason, j.finish_reason AS rejected_finish_reason,
       rft.state(g.status, cu.times_sampled, cv.kept, g.trainable) AS chosen_state,
       rft.state(jg.status, ju.times_sampled, jv.kept, jg.trainable) AS rejected_state, p.builder, p.label_cut, p.created_at
FROM rft.preference_pair p
JOIN rft.experience c ON c.experience_id = p.chosen_id
JOIN rft.experience j ON j.experience_id = p.rejected_id
JOIN rft.run r ON r.run_id = c.run_id
JOIN rft.rollout_group g ON g.group_id = c.group_id
JOIN rft.task t USING (task_id)
JOIN rft.rollout_group jg ON jg.group_id = j.group_id
LEFT JOIN rft.verdict cv ON cv.experience_id = c.experience_id AND cv.newest_of = g.decided_by
LEFT JOIN rft.verdict jv ON jv.experience_id = j.experience_id AND jv.newest_of = jg.decided_by
LEFT JOIN rft.draw cu ON cu.newest_of = c.experience_id
LEFT JOIN rft.draw ju ON ju.newest_of = j.experience_id
LEFT JOIN rft.group_prompt gp ON gp.group_id = c.group_id AND gp.prompt_digest = c.prompt_digest;
