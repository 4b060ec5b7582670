-- Fills a run with groups like those of a writer: they can be drawn, and have rollouts, experiences and every index. All experiences share
-- the arrays of those that were written before. %(first)s: first id of groups, and from it of rollouts and experiences.

-- name: groups
INSERT INTO rft.rollout_group (group_id, run_id, attempt_id, ordinal, task_id, explore_step, group_size, source, status, claim_token,
    is_adopted, sealed_at, ready_at, decided_by)
OVERRIDING SYSTEM VALUE
SELECT %(first)s::bigint + n, %(run_id)s, -%(run_id)s, n, t.ids[1 + mod(n, cardinality(t.ids))], 0, %(group_size)s,
       CASE WHEN mod(n, 4) = 0 THEN 'human' ELSE 'import' END::rft.experience_source, 'ready', 1, true, now(), now(), 'none'
FROM (SELECT array_agg(task_id ORDER BY task_id) AS ids FROM rft.task) t, generate_series(0, %(num)s::bigint - 1) AS n;

-- name: rollouts
INSERT INTO rft.rollout (rollout_id, group_id, rollout_index, outcome, reward, num_turns, seconds)
OVERRIDING SYSTEM VALUE
SELECT (%(first)s::bigint + n) * %(group_size)s + i, %(first)s::bigint + n, i, 'ok', mod(i, 2), 1, 1
FROM generate_series(0, %(num)s::bigint - 1) AS n, generate_series(0, %(group_size)s::integer - 1) AS i;

-- name: prompts
INSERT INTO rft.group_prompt (group_id, prompt_digest, prompt)
SELECT %(first)s::bigint + n, 'p', repeat('p', 100) FROM generate_series(0, %(num)s::bigint - 1) AS n;

-- name: experiences
INSERT INTO rft.experience (experience_id, run_id, group_id, rollout_id, source, prompt_digest, response, reward_sampled, reward,
    metrics, num_prompt_tokens, num_response_tokens, num_trained_tokens, finish_reason, segment_id, segment_row)
OVERRIDING SYSTEM VALUE
SELECT k.id, %(run_id)s, %(first)s::bigint + n, k.id, 'import', 'p', repeat('r', 150), mod(i, 2), mod(i, 2), '{"seconds": 1}',
       s.prompts[k.place], s.responses[k.place], s.responses[k.place], 'stop', s.segments[k.place], s.rows[k.place]
FROM (SELECT array_agg(num_prompt_tokens) AS prompts, array_agg(num_response_tokens) AS responses, array_agg(segment_id) AS segments,
             array_agg(segment_row) AS rows
      FROM rft.experience WHERE run_id = %(samples_run_id)s) s,
     generate_series(0, %(num)s::bigint - 1) AS n, generate_series(0, %(group_size)s::integer - 1) AS i,
     LATERAL (SELECT (%(first)s::bigint + n) * %(group_size)s + i AS id, 1 + mod(n * 5 + i * 7, cardinality(s.rows)) AS place) k;

-- name: worklist
INSERT INTO rft.worklist (run_id, consumer, item_kind, item_id, sort_key, priority, policy_step)
SELECT %(run_id)s, 'trainer', 'group', %(first)s::bigint + n, n, 0.01 + mod(n * 7919, 1000) / 1000.0, 2147483647
FROM generate_series(0, %(num)s::bigint - 1) AS n;

-- name: tasks
INSERT INTO rft.task (taskset, task_key, payload) SELECT 'set' || mod(n, 4), n::text, '{}' FROM generate_series(0, 9999) AS n;

-- name: touch
-- The floor: one row changed and committed.
UPDATE rft.run SET stop_requested = false WHERE run_id = %(run_id)s;

-- name: explained_draw
EXPLAIN (ANALYZE, BUFFERS, WAL, FORMAT JSON)
SELECT * FROM rft.draw_groups(%(run_id)s, %(attempt_id)s, %(step)s, %(num_groups)s, 0);

-- name: sizes
SELECT pg_database_size(current_database()) AS database_bytes,
       (SELECT count(*) FROM rft.worklist WHERE run_id = %(run_id)s AND consumer = 'trainer' AND available) AS waiting;
