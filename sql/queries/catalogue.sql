-- name: query_columns (read)
-- Tables and views a DuckDB query may name, with their columns in order.
SELECT table_name::text AS table_name, column_name::text AS column_name,
       CASE data_type WHEN 'ARRAY' THEN substr(udt_name, 2) || '[]' ELSE data_type END AS data_type
FROM information_schema.columns WHERE table_schema = 'rft' ORDER BY table_name, ordinal_position;

-- name: lineage_of_experience (read)
-- Each step that used an experience, the rewards it used, and the first checkpoint that contains the experience.
SELECT run, attempt_id, trainer_step, reward_used, reward_now, turn_rewards_used, nullif(turn_rewards_now, '{}') AS turn_rewards_now, corrected_since,
       checkpoint_step, checkpoint_uri
FROM rft.v_lineage WHERE experience_id = %(experience_id)s ORDER BY trainer_step, attempt_id;

-- name: lineage_of_checkpoint (read)
-- All experiences that the run's current history trained on up to a step, in order of use.
SELECT c.trainer_step, c.experience_id, c.reward_used, l.reward_now, l.corrected_since
FROM rft.v_consumption c
JOIN rft.v_lineage l ON l.experience_id = c.experience_id AND l.attempt_id = c.attempt_id AND l.trainer_step = c.trainer_step
WHERE c.run_id = %(run_id)s AND c.trainer_step <= %(step)s ORDER BY c.trainer_step, c.slot;

-- name: lineage_steps (read)
-- Steps of the run's current history that have a checkpoint.
SELECT DISTINCT c.trainer_step FROM rft.run r
JOIN rft.v_attempt_history h ON h.history_id = r.current_attempt_id
JOIN rft.checkpoint c ON c.attempt_id = h.attempt_id AND (h.last_step IS NULL OR c.trainer_step <= h.last_step)
WHERE r.run_id = %(run_id)s ORDER BY c.trainer_step;

-- name: experience_exists (read)
-- One row if the experience exists.
SELECT 1 AS found FROM rft.experience WHERE experience_id = %(experience_id)s;

-- name: open_sessions (read)
-- Sessions other than this one, by program.
SELECT pid, application_name, state, backend_start FROM pg_stat_activity
WHERE backend_type = 'client backend' AND pid <> pg_backend_pid() AND datname IS NOT NULL ORDER BY backend_start;

-- name: doctor_counts (read)
-- Number of segments, of rows in them, and of experiences.
SELECT (SELECT count(*) FROM rft.segment) AS segments, (SELECT coalesce(sum(num_rows), 0)::bigint FROM rft.segment) AS rows,
       (SELECT count(*) FROM rft.experience) AS experiences;

-- name: broken_references (read)
-- Rows that refer to what does not exist.
SELECT * FROM rft.broken_references();

-- name: wrong_states
-- Stored parts of the states of experiences that differ from what follows from verdicts, draws and histories.
SELECT 'verdict' AS part, w.verdict_id AS part_id, w.experience_id FROM rft.wrong_verdicts() w
UNION ALL
SELECT 'draw', w.draw_id, w.experience_id FROM rft.run r CROSS JOIN LATERAL rft.wrong_uses(r.run_id) w
ORDER BY 1, 2;

-- name: lock_runs
-- Keep attempts from starting and groups from being drawn.
SELECT run_id FROM rft.run ORDER BY run_id FOR UPDATE;

-- name: correct_states
-- Derive the stored parts of all states again; return how many were wrong.
SELECT rft.correct_verdicts() + coalesce((SELECT sum(rft.correct_uses(run_id)) FROM rft.run), 0)::bigint AS num_corrected;

-- name: turn_rewards_from (read)
-- The first segment whose experiences have rows for all rewards of turns, and whether earlier ones are in archives; no row if all experiences have them.
SELECT b.turn_rewards_from, EXISTS (SELECT FROM rft.archived_segment s WHERE s.segment_id < b.turn_rewards_from) AS has_archived
FROM rft.buffer b WHERE b.turn_rewards_from > 0;

-- name: without_turn_rewards (read)
-- Some experiences in ascending order of their ids, and whether they were stored before schema 0003 and have no rows for rewards of turns. The others are
-- not left out, because the server would then look at all experiences for the next few.
SELECT e.*, e.segment_id < %(from_segment)s::bigint
    AND NOT EXISTS (SELECT FROM rft.turn_reward t WHERE t.experience_id = e.experience_id)
    AND NOT EXISTS (SELECT FROM rft.purged_experience x WHERE x.experience_id = e.experience_id)
    AND NOT EXISTS (SELECT FROM rft.archived_segment s WHERE s.segment_id = e.segment_id) AS is_without
FROM (
    SELECT experience_id, turn_index, num_turns, segment_id, segment_row FROM rft.experience
    WHERE experience_id > %(after)s::bigint ORDER BY experience_id LIMIT %(count)s) e
ORDER BY e.experience_id;

-- name: insert_turn_rewards
-- Add rewards of turns as they were sampled.
INSERT INTO rft.turn_reward (experience_id, turn, reward_sampled, reward)
SELECT experience_id, turn, reward, reward
FROM unnest(%(experience_ids)s::bigint[], %(turns)s::integer[], %(rewards)s::float8[]) AS u (experience_id, turn, reward)
ON CONFLICT DO NOTHING;

-- name: turns_to_compare (read)
-- Some experiences with what is stored about their turns, in ascending order of their ids, and whether they still have arrays.
SELECT e.*, t.turns, t.rewards,
       NOT EXISTS (SELECT FROM rft.purged_experience x WHERE x.experience_id = e.experience_id)
           AND NOT EXISTS (SELECT FROM rft.archived_segment s WHERE s.segment_id = e.segment_id) AS has_arrays
FROM (
    SELECT experience_id, turn_index, num_turns, num_prompt_tokens + num_response_tokens AS num_tokens, num_response_tokens, num_trained_tokens,
           segment_id, segment_row
    FROM rft.experience WHERE experience_id > %(after)s::bigint ORDER BY experience_id LIMIT %(count)s) e
CROSS JOIN LATERAL (
    SELECT array_agg(r.turn ORDER BY r.turn) AS turns, array_agg(r.reward_sampled ORDER BY r.turn) AS rewards
    FROM rft.turn_reward r WHERE r.experience_id = e.experience_id) t
ORDER BY e.experience_id;

-- name: labels_of_turns (read)
-- One row if a reward of a turn of the experience was corrected.
SELECT FROM rft.label WHERE experience_id = %(experience_id)s AND turn IS NOT NULL LIMIT 1;

-- name: correct_turn_facts
-- Set what the arrays say about the turns of an experience; NULL keeps a value. The transaction must allow changes of facts.
UPDATE rft.experience SET num_turns = coalesce(%(num_turns)s, num_turns), turn_index = coalesce(%(turn_index)s, turn_index),
    num_trained_tokens = coalesce(%(num_trained_tokens)s, num_trained_tokens)
WHERE experience_id = %(experience_id)s;

-- name: allow_turn_reward_deletes
-- Let the owner delete rewards of turns until `refuse_turn_reward_deletes` in the same transaction; others wait.
ALTER TABLE rft.turn_reward DISABLE TRIGGER turn_reward_no_delete;

-- name: delete_turn_rewards
-- Delete the rewards of the turns of an experience.
DELETE FROM rft.turn_reward WHERE experience_id = %(experience_id)s;

-- name: refuse_turn_reward_deletes
-- Refuse deletes of rewards of turns again.
ALTER TABLE rft.turn_reward ENABLE TRIGGER turn_reward_no_delete;

-- name: all_have_turn_rewards
-- Record that all experiences have rows for their rewards of turns.
UPDATE rft.buffer SET turn_rewards_from = 0;

-- name: related_to_experience (read)
-- What an experience was created from, and what was created from it.
SELECT 'parent' AS relation, p.experience_id, p.source::text AS source, NULL AS task_key
FROM rft.experience e JOIN rft.experience p ON p.experience_id = e.parent_id WHERE e.experience_id = %(experience_id)s
UNION ALL
SELECT 'child', c.experience_id, c.source::text, NULL FROM rft.experience c WHERE c.parent_id = %(experience_id)s
UNION ALL
SELECT 'task', NULL, t.taskset, t.task_key FROM rft.task t WHERE t.features ? 'parent_experience_id' AND t.features ->> 'parent_experience_id' = %(experience_id)s::text
ORDER BY relation, experience_id, task_key;

-- name: reward_models_of_experience (read)
-- The models whose scores are part of an experience's reward: those of its run, where a part of the reward is a model's.
SELECT m.used_as::text AS used_as, m.uri, m.trained_by, m.trainer_step
FROM rft.experience e JOIN rft.v_run_model m USING (run_id)
WHERE e.experience_id = %(experience_id)s AND m.used_as = 'reward'
  AND EXISTS (SELECT FROM jsonb_object_keys(e.reward_parts) AS k (name) WHERE k.name LIKE '%%reward_model')
ORDER BY m.since, m.uri;

-- name: limit_statements
-- Let the server cancel every statement of the current transaction that takes longer than the limit.
SELECT set_config('statement_timeout', %(limit)s::text, true);

-- name: share_snapshot
-- The name of this transaction's snapshot, for other sessions that must see the same rows.
SELECT pg_export_snapshot() AS snapshot;

-- name: array_sizes (read)
-- The stored arrays: their size in segments and their number of rows.
SELECT coalesce(sum(length_bytes), 0)::bigint AS size_bytes, coalesce(sum(num_rows), 0)::bigint AS num_rows FROM rft.segment;
