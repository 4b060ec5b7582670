-- The parts of rewards as rows.

CREATE VIEW rft.v_reward_part AS
SELECT e.experience_id, r.name AS run, e.run_id, t.taskset, t.task_key, e.group_id, g.explore_step, o.rollout_index, e.role, p.name,
       CASE jsonb_typeof(p.value) WHEN 'number' THEN p.value::float8 WHEN 'boolean' THEN p.value::boolean::integer::float8 END AS value,
       e.reward_sampled, e.reward
FROM rft.experience e
JOIN rft.run r USING (run_id)
JOIN rft.rollout_group g USING (group_id)
LEFT JOIN rft.rollout o ON o.rollout_id = e.rollout_id
LEFT JOIN rft.task t ON t.task_id = g.task_id
CROSS JOIN LATERAL jsonb_each(e.reward_parts) AS p (name, value);
COMMENT ON VIEW rft.v_reward_part IS 'The parts of rewards, one row for each part of each experience, with its value without weight. Experiences of one rollout repeat its parts. Without the parts of archived runs, which the table reward_part of `rft query` has.';
