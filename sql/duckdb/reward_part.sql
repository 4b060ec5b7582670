-- The parts of rewards, for `rft query`: one row for each part of each experience, with its value without weight. Also those of archived runs, which
-- rft.v_reward_part lacks.
CREATE VIEW reward_part AS
SELECT e.experience_id, e.run, e.taskset, e.task_key, e.group_id, e.explore_step, e.rollout_index, e.role, p.part.key AS name,
       try_cast(p.part.value AS DOUBLE) AS value, e.reward_sampled, e.reward
FROM experience e CROSS JOIN LATERAL (SELECT unnest(map_entries(CAST(CAST(e.reward_parts AS JSON) AS MAP(VARCHAR, VARCHAR)))) AS part) p;
