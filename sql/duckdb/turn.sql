-- The turns of experiences, for `rft query`: one row for each turn whose answer is trained. An experience without the array turns is one turn.
-- first_token, end_token: places in token_ids, of its first token and after its last. reward_sampled, reward: of the turn alone, as the workflow recorded it and
-- as it stands. PostgreSQL sends only the rewards that were corrected, which are few.
CREATE VIEW turn AS
SELECT e.experience_id, e.run, e.group_id, e.rollout_index, coalesce(e.turns[3 * t.place], e.turn_index) AS turn, e.fork, e.role,
       coalesce(e.turns[3 * t.place - 2], e.num_prompt_tokens) AS first_token,
       coalesce(e.turns[3 * t.place - 1], e.num_prompt_tokens + e.num_response_tokens) AS end_token,
       list_slice(e.token_ids, first_token + 1, end_token) AS token_ids,
       list_slice(e.behavior_logprobs, first_token + 1, end_token) AS behavior_logprobs,
       e.state_hash[t.place] AS state_hash, e.step_reward[t.place]::DOUBLE AS reward_sampled,
       coalesce(c.reward, e.step_reward[t.place]::DOUBLE) AS reward, e.reward AS experience_reward
FROM experience e CROSS JOIN LATERAL range(1, e.num_turns + 1) t(place)
LEFT JOIN v_corrected_turn c ON c.experience_id = e.experience_id AND c.turn = coalesce(e.turns[3 * t.place], e.turn_index);
