-- name: tasks
-- One task for all groups.
INSERT INTO rft.task (taskset, task_key, payload) VALUES ('queue', 'one', '{"answer": "3"}') RETURNING task_id;

-- name: groups
-- Groups that wait for a verdict.
INSERT INTO rft.rollout_group (run_id, attempt_id, ordinal, task_id, explore_step, group_size, status, sealed_at)
SELECT %(run_id)s, 0, n, %(task_id)s, n / 100, 4, 'sealed', now() FROM generate_series(1, %(num)s / 4) AS n;

-- name: prompts
-- Their prompts.
INSERT INTO rft.group_prompt (group_id, prompt_digest, prompt, messages)
SELECT group_id, 'p', repeat('What is 1 + 2? ', 20), jsonb_build_array(jsonb_build_object('role', 'user', 'content', repeat('What is 1 + 2? ', 20)))
FROM rft.rollout_group WHERE run_id = %(run_id)s;

-- name: rollouts
-- Four rollouts of each.
INSERT INTO rft.rollout (group_id, rollout_index, outcome, reward, num_turns, seconds)
SELECT group_id, i, 'ok', i %% 2, 1, 1 FROM rft.rollout_group CROSS JOIN generate_series(0, 3) AS i WHERE run_id = %(run_id)s;

-- name: experiences
-- An experience of each.
INSERT INTO rft.experience (run_id, group_id, rollout_id, prompt_digest, response, reward_sampled, reward, num_prompt_tokens, num_response_tokens,
                            num_trained_tokens, finish_reason, segment_id, segment_row, reward_parts)
SELECT %(run_id)s, group_id, rollout_id, 'p', repeat('I add the numbers, and find 3. ', 20), reward, reward, 100, 150, 150, 'stop', 1, 0, '{"exact": 1}'
FROM rft.rollout JOIN rft.rollout_group USING (group_id) WHERE run_id = %(run_id)s;

-- name: reviews
-- A question about each: `spread` deadlines are a microsecond apart, others the same.
INSERT INTO rft.review (experience_id, group_id, run_id, name, question, otherwise, asked_at, deadline)
SELECT experience_id, group_id, run_id, 'bench', 'Is the answer right?', 'pass', rft.clock(),
       date_trunc('day', rft.clock()) + interval '2 d' + CASE WHEN %(spread)s THEN experience_id * interval '1 us' ELSE interval '0' END
FROM rft.experience WHERE run_id = %(run_id)s;

-- name: analyze
-- Statistics, as autovacuum makes them.
ANALYZE;
