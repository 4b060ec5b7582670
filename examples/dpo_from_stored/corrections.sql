-- A person's corrections of the verifier's rewards. The verifier distinguishes only right (1) and wrong (0), but wrong answers differ.

-- The sum is right, but the answer runs on until it is cut off: better than a wrong sum.
UPDATE rft.experience e SET reward = 0.5
FROM rft.v_experience v
WHERE v.experience_id = e.experience_id AND v.run = 'grpo-reasoning' AND v.finish_reason = 'length' AND v.reward_sampled = 0
  AND v.response ~ ('^[^=]*= ' || v.answer || '\M');

-- Another question is answered than the one that was asked (`8 / 1 = 2` to `7 - 4 =`): worse than a wrong sum.
UPDATE rft.experience e SET reward = -0.5
FROM rft.rollout_group g JOIN rft.task t USING (task_id) JOIN rft.run r USING (run_id)
WHERE g.group_id = e.group_id AND r.name = 'grpo-reasoning' AND e.reward_sampled = 0
  AND NOT starts_with(e.response, t.payload #>> '{metadata,expression}');
