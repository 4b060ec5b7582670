-- The verifier knows right (1) and everything else (0). An answer with one wrong digit is better than one with several.
UPDATE rft.experience e SET reward = 0.5
FROM rft.v_experience v
WHERE v.experience_id = e.experience_id AND v.run = 'sort-grpo' AND v.reward_sampled = 0 AND v.finish_reason = 'stop'
  AND length(v.response) = length(v.answer)
  AND 1 = (SELECT count(*) FROM generate_series(1, length(v.answer)) i WHERE substr(v.response, i, 1) <> substr(v.answer, i, 1));
