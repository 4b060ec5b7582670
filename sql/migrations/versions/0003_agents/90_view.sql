-- Views that schema 0003 extends. New columns of a view that is replaced stand at its end.

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
       e.source, rft.chat(gp.messages, e.response_messages, e.response) AS messages, e.parent_id, e.segment_id, e.segment_row, e.created_at, e.response_hash, e.num_trained_tokens, e.num_turns, e.fork,
       e.rollout_id, e.role
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

CREATE OR REPLACE VIEW rft.v_consumption AS
SELECT r.name AS run, r.run_id, d.draw_id, d.attempt_id, d.trainer_step, d.slot, d.item_kind, d.item_id, e.group_id, d.experience_id, d.reward_used,
       d.staleness,
       (SELECT min(c.checkpoint_id) FROM rft.checkpoint c
        WHERE c.attempt_id = d.attempt_id AND c.trainer_step >= d.trainer_step) AS checkpoint_id,
       d.turn_rewards_used
FROM rft.run r
JOIN rft.v_attempt_history h ON h.history_id = r.current_attempt_id
JOIN rft.draw d ON d.attempt_id = h.attempt_id AND (h.last_step IS NULL OR d.trainer_step <= h.last_step)
LEFT JOIN rft.experience e ON e.experience_id = d.experience_id
WHERE EXISTS (SELECT FROM rft.checkpoint c WHERE c.attempt_id = d.attempt_id AND c.trainer_step >= d.trainer_step);

CREATE OR REPLACE VIEW rft.v_lineage AS
SELECT d.experience_id, r.name AS run, d.attempt_id, d.trainer_step, d.reward_used, e.reward AS reward_now,
       d.reward_used IS DISTINCT FROM coalesce(CASE WHEN e.reward_final THEN e.reward END, v.reward, e.reward)
           OR CASE WHEN d.turn_rewards_used IS NULL
                   THEN EXISTS (SELECT FROM rft.turn_reward t WHERE t.experience_id = d.experience_id AND t.reward <> t.reward_sampled)
                   ELSE d.turn_rewards_used <> ARRAY(SELECT t.reward FROM rft.turn_reward t WHERE t.experience_id = d.experience_id ORDER BY t.turn)
              END AS corrected_since,
       c.checkpoint_id, c.trainer_step AS checkpoint_step, c.uri AS checkpoint_uri, d.turn_rewards_used,
       ARRAY(SELECT t.reward FROM rft.turn_reward t WHERE t.experience_id = d.experience_id ORDER BY t.turn) AS turn_rewards_now
FROM rft.draw d
JOIN rft.run_attempt a USING (attempt_id)
JOIN rft.run r USING (run_id)
JOIN rft.experience e USING (experience_id)
JOIN rft.rollout_group g ON g.group_id = e.group_id
LEFT JOIN rft.verdict v ON v.experience_id = e.experience_id AND v.newest_of = g.decided_by
LEFT JOIN LATERAL (
    SELECT * FROM rft.checkpoint c WHERE c.attempt_id = d.attempt_id AND c.trainer_step >= d.trainer_step
    ORDER BY c.trainer_step LIMIT 1) c ON true;
COMMENT ON VIEW rft.v_lineage IS 'Experiences with the steps that used them and the first checkpoint that contains those. corrected_since: the reward, or that of a turn, changed after the draw. turn_rewards_used: NULL if they were those that were sampled.';
