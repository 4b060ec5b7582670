-- What a stage wrote on a task says nothing about how well the policy does on it, whoever corrects its reward.

CREATE OR REPLACE FUNCTION rft.correct_observations() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off SET enable_material = off SET enable_mergejoin = off
AS $$
BEGIN
    INSERT INTO rft.task_observation (run_id, attempt_id, ordinal, task_id, kind, successes, trials, author, reason)
    SELECT g.run_id, g.attempt_id, g.ordinal, g.task_id, 'correction', d.successes, d.trials,
           coalesce(nullif(current_setting('rft.author', true), ''), session_user), nullif(current_setting('rft.reason', true), '')
    FROM (
        SELECT c.group_id, sum(c.successes / t.num_turns) AS successes, sum(c.trials / t.num_turns) AS trials
        FROM (
            SELECT n.group_id, n.rollout_id,
                   coalesce(least(greatest(n.reward, 0), 1), 0) - coalesce(least(greatest(o.reward, 0), 1), 0) AS successes,
                   ((n.reward IS NOT NULL)::integer - (o.reward IS NOT NULL)::integer)::double precision AS trials
            FROM new_rows n JOIN old_rows o USING (experience_id) WHERE n.reward IS DISTINCT FROM o.reward) c
        CROSS JOIN LATERAL (SELECT greatest(num_turns, 1) AS num_turns FROM rft.rollout WHERE rollout_id = c.rollout_id OFFSET 0) t
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
