-- name: plan_evaluation
-- Plan an evaluation, once per step of a history, taskset and decoding.
INSERT INTO rft.evaluation (run_id, policy_version_id, trainer_step, purpose, taskset, decoding, num_answers, uri, checksum)
SELECT %(run_id)s, %(policy_version_id)s, %(trainer_step)s, %(purpose)s, %(taskset)s, %(decoding)s, %(num_answers)s, %(uri)s, %(checksum)s
WHERE NOT EXISTS (
    SELECT FROM rft.evaluation e
    JOIN rft.policy_version p USING (policy_version_id)
    JOIN rft.run r ON r.run_id = p.run_id
    JOIN rft.v_attempt_history h ON h.history_id = r.current_attempt_id AND h.attempt_id = p.attempt_id
        AND (h.last_step IS NULL OR p.trainer_step <= h.last_step)
    WHERE e.run_id = %(run_id)s AND e.trainer_step = %(trainer_step)s AND e.purpose = %(purpose)s AND e.taskset = %(taskset)s
      AND e.decoding = %(decoding)s AND e.status <> 'failed')
ON CONFLICT DO NOTHING;

-- name: claim_evaluation
-- Claim the oldest planned evaluation of a run, or of one policy version; none if the worker was recorded as gone, as in claim_groups.
WITH me AS MATERIALIZED (
    SELECT bool_and(stopped_at IS NULL) IS NOT FALSE AS works
    FROM (SELECT stopped_at FROM rft.worker WHERE worker_id = %(worker_id)s FOR SHARE) w),
picked AS (
    SELECT evaluation_id FROM rft.evaluation WHERE run_id = %(run_id)s AND status = 'planned' AND (SELECT works FROM me)
        AND (%(policy_version_id)s::bigint IS NULL OR policy_version_id = %(policy_version_id)s)
    ORDER BY policy_version_id, evaluation_id LIMIT 1 FOR UPDATE SKIP LOCKED)
UPDATE rft.evaluation e
SET status = 'claimed', claimed_by = %(worker_id)s, lease_until = rft.clock() + %(lease_s)s * interval '1 s'
FROM picked p WHERE e.evaluation_id = p.evaluation_id
RETURNING e.*;

-- name: reserve_evaluation
-- Claim the oldest evaluation that has waited for a while, unless another worker answers one of the same weights; none if the worker was recorded as gone,
-- as in claim_groups. All that reserve at a time meet at this row, so that one of them gets it; the others wait for its lock, and then find the row claimed.
WITH me AS MATERIALIZED (
    SELECT bool_and(stopped_at IS NULL) IS NOT FALSE AS works
    FROM (SELECT stopped_at FROM rft.worker WHERE worker_id = %(worker_id)s FOR SHARE) w)
UPDATE rft.evaluation e
SET status = 'claimed', claimed_by = %(worker_id)s, lease_until = rft.clock() + %(lease_s)s * interval '1 s'
WHERE e.evaluation_id = (
    SELECT p.evaluation_id FROM rft.evaluation p
    WHERE p.run_id = %(run_id)s AND p.status = 'planned' AND p.policy_version_id <> ALL (%(but)s::bigint[]) AND (SELECT works FROM me)
      AND p.planned_at < clock_timestamp() - %(after_s)s * interval '1 s'
      AND NOT EXISTS (SELECT FROM rft.evaluation o WHERE o.run_id = p.run_id AND o.policy_version_id = p.policy_version_id AND o.status = 'claimed')
    ORDER BY p.policy_version_id, p.evaluation_id LIMIT 1)
  AND e.status = 'planned'
RETURNING e.*;

-- name: release_evaluations
-- Release the evaluations of a claim whose answer the explorer never received: all, those of one policy version, or those of no version in `but`.
UPDATE rft.evaluation SET status = 'planned', claimed_by = NULL, lease_until = NULL
WHERE run_id = %(run_id)s AND claimed_by = %(worker_id)s AND status = 'claimed'
  AND (%(policy_version_id)s::bigint IS NULL OR policy_version_id = %(policy_version_id)s) AND policy_version_id <> ALL (%(but)s::bigint[]);

-- name: evaluation_tasks (read)
-- The questions of a taskset.
SELECT task_id, taskset, task_key, payload FROM rft.task WHERE taskset = %(taskset)s AND status = 'active' ORDER BY task_id;

-- name: answered_questions (read)
-- The answers of an evaluation that are stored.
SELECT task_id, answer_index FROM rft.evaluation_answer WHERE evaluation_id = %(evaluation_id)s;

-- name: hold_evaluation
-- One row if this worker still holds the evaluation, which it then keeps until the end of the transaction.
SELECT evaluation_id FROM rft.evaluation
WHERE evaluation_id = %(evaluation_id)s AND claimed_by = %(worker_id)s AND status = 'claimed' FOR SHARE;

-- name: insert_answers
-- Store answers of an evaluation; those that are stored stay as they are.
INSERT INTO rft.evaluation_answer (evaluation_id, task_id, answer_index, reward, response, num_response_tokens, finish_reason, error, outcome, stop_reason,
    num_turns, seconds, reward_parts, metrics, chats)
SELECT %(evaluation_id)s, a.*
FROM unnest(%(task_ids)s::bigint[], %(answer_index)s::integer[], %(reward)s::float8[], %(response)s::text[], %(num_response_tokens)s::integer[],
    %(finish_reason)s::text[], %(error)s::text[], %(outcome)s::rft.rollout_outcome[], %(stop_reason)s::rft.stop_reason[], %(num_turns)s::integer[],
    %(seconds)s::float8[], %(reward_parts)s::jsonb[], %(metrics)s::jsonb[], %(chats)s::jsonb[]) a
ON CONFLICT DO NOTHING;

-- name: finish_evaluation
-- Finish an evaluation, whose answers are all stored. If some could not be scored, `error` gives their number.
UPDATE rft.evaluation e SET status = 'done', num_tasks = a.num_tasks, mean_reward = a.mean_reward, seconds = %(seconds)s, finished_at = clock_timestamp(),
    lease_until = NULL,
    error = CASE WHEN a.num_failed > 0 THEN
        format('%%s of %%s answers failed and count 0', a.num_failed, a.num_answers) || coalesce('; the first: ' || a.first_error, '') END
FROM (
    SELECT count(DISTINCT task_id) AS num_tasks, count(*) AS num_answers, coalesce(avg(reward), 0) AS mean_reward, count(error) AS num_failed,
           (array_agg(error ORDER BY task_id, answer_index) FILTER (WHERE error IS NOT NULL AND error <> '[purged]'))[1] AS first_error
    FROM rft.evaluation_answer WHERE evaluation_id = %(evaluation_id)s) a
WHERE e.evaluation_id = %(evaluation_id)s AND e.claimed_by = %(worker_id)s AND e.status = 'claimed';

-- name: lock_evaluation
-- Lock an evaluation, so that the next statement sees a purge that held it.
SELECT evaluation_id FROM rft.evaluation WHERE evaluation_id = %(evaluation_id)s FOR UPDATE;

-- name: fail_evaluation
-- End an evaluation that this worker holds as failed. The error is not stored if tasks that it may quote were purged meanwhile.
UPDATE rft.evaluation SET status = 'failed', finished_at = clock_timestamp(), lease_until = NULL,
    error = CASE WHEN rft.was_purged_since(NULL, taskset, planned_at) THEN '[purged]' ELSE %(error)s END
WHERE evaluation_id = %(evaluation_id)s AND claimed_by = %(worker_id)s AND status = 'claimed';

-- name: drop_lost_evaluations
-- Delete unfinished evaluations of earlier attempts: a new attempt asks for them again. The old rows refer to weights that no longer
-- exist, and a policy version, taskset and decoding can have only one row. A run that only evaluates keeps them: its weights are a folder.
WITH lost AS (
    DELETE FROM rft.evaluation e USING rft.run r
    WHERE e.run_id = %(run_id)s AND r.run_id = e.run_id AND r.mode <> 'eval' AND e.status <> 'done' RETURNING e.evaluation_id)
DELETE FROM rft.evaluation_answer a USING lost l WHERE a.evaluation_id = l.evaluation_id;

-- name: adopt_evaluations
-- Give the unfinished evaluations of a run that only evaluates to the policy version that a new attempt published of the same weights.
UPDATE rft.evaluation SET policy_version_id = %(policy_version_id)s, status = 'planned', claimed_by = NULL, lease_until = NULL, error = NULL,
    finished_at = NULL
WHERE run_id = %(run_id)s AND status <> 'done';

-- name: evaluated_checksums (read)
-- The checksums of the weights that evaluations of a run name.
SELECT DISTINCT checksum FROM rft.evaluation WHERE run_id = %(run_id)s;

-- name: answered_validations (read)
-- Finished validations of the run's current history.
SELECT DISTINCT e.trainer_step, e.taskset, e.decoding
FROM rft.run r
JOIN rft.v_attempt_history h ON h.history_id = r.current_attempt_id
JOIN rft.policy_version p ON p.attempt_id = h.attempt_id AND (h.last_step IS NULL OR p.trainer_step <= h.last_step)
JOIN rft.evaluation e ON e.policy_version_id = p.policy_version_id AND e.purpose = 'validation' AND e.status = 'done'
WHERE r.run_id = %(run_id)s;

-- name: validation_scores (read)
-- Mean over the tasksets, for every step of the run's current history at which all of them were answered, with few failed answers.
SELECT trainer_step, avg(mean_reward) AS score
FROM (
    SELECT DISTINCT ON (e.trainer_step, e.taskset) e.trainer_step, e.mean_reward
    FROM rft.run r
    JOIN rft.v_attempt_history h ON h.history_id = r.current_attempt_id
    JOIN rft.policy_version p ON p.attempt_id = h.attempt_id AND (h.last_step IS NULL OR p.trainer_step <= h.last_step)
    JOIN rft.evaluation e ON e.policy_version_id = p.policy_version_id AND e.purpose = 'validation' AND e.status = 'done'
    WHERE r.run_id = %(run_id)s AND e.decoding = %(decoding)s AND e.taskset = ANY (%(tasksets)s)
      AND (e.error IS NULL OR e.num_tasks * e.num_answers * %(max_failed)s >=
           (SELECT count(*) FROM rft.evaluation_answer w WHERE w.evaluation_id = e.evaluation_id AND w.error IS NOT NULL))
    ORDER BY e.trainer_step, e.taskset, e.evaluation_id DESC) newest
GROUP BY trainer_step HAVING count(*) = cardinality(%(tasksets)s::text[]);

-- name: open_evaluations (read)
-- Unfinished evaluations of a run, with the weights that they still need.
SELECT status = 'planned' AS is_planned, policy_version_id, uri FROM rft.evaluation WHERE run_id = %(run_id)s AND status IN ('planned', 'claimed');

-- name: failed_evaluations (read)
-- The failed evaluations of a run's current attempt.
SELECT e.* FROM rft.evaluation e
JOIN rft.policy_version p USING (policy_version_id) JOIN rft.run r ON r.run_id = p.run_id AND r.current_attempt_id = p.attempt_id
WHERE e.run_id = %(run_id)s AND e.status = 'failed';
