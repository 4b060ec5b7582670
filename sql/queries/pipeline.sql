-- name: claim_sealed_groups
-- `from_key` is a hint (see claims.SealedQueue). Items by their key and not by a join: that would read the whole queue, with all
-- that a snapshot held open keeps of it.
WITH picked AS (
    SELECT item_id FROM rft.worklist
    WHERE consumer = 'pipeline/' || %(run_id)s AND available AND times_sampled = 0 AND sort_key >= %(from_key)s
    ORDER BY sort_key LIMIT %(count)s FOR UPDATE SKIP LOCKED)
UPDATE rft.worklist w SET available = false, claimed_by = %(worker_id)s, lease_until = rft.clock() + %(lease_s)s * interval '1 s'
WHERE w.consumer = 'pipeline/' || %(run_id)s AND w.item_kind = 'group' AND w.item_id = ANY (ARRAY(SELECT item_id FROM picked))
RETURNING w.item_id AS group_id, w.sort_key;

-- name: release_items
-- What a pipeline worker holds without knowing, after a claim whose answer was lost.
UPDATE rft.worklist SET available = true, claimed_by = NULL, lease_until = NULL
WHERE consumer = 'pipeline/' || %(run_id)s AND claimed_by = %(worker_id)s AND NOT available;

-- name: batch_of_groups
-- What stages see of an experience. screened: why an explorer gave up its group after the first rollouts.
SELECT e.experience_id, e.group_id, o.rollout_index, e.turn_index, g.task_id, t.taskset, t.payload ->> 'answer' AS answer,
       e.prompt, e.response, e.reward, e.reward_sampled, e.num_prompt_tokens, e.num_response_tokens, e.finish_reason,
       e.metrics::text AS metrics, e.source::text AS source, o.outcome::text AS outcome, o.error,
       (SELECT min(c.error) FROM rft.rollout c WHERE c.group_id = e.group_id AND c.outcome = 'cancelled' AND c.error LIKE 'screened out: %%') AS screened,
       (SELECT coalesce(max(l.label_id), 0) FROM rft.label l WHERE l.experience_id = e.experience_id) AS label_cut
FROM rft.experience e
JOIN rft.rollout_group g USING (group_id)
JOIN rft.rollout o USING (rollout_id)
JOIN rft.task t USING (task_id)
WHERE e.group_id = ANY (%(group_ids)s)
ORDER BY g.explore_step, g.ordinal, o.rollout_index, e.turn_index;

-- name: pipeline_of_run
-- FOR SHARE: the run's pipeline does not change while verdicts are committed.
SELECT name, pipeline_version FROM rft.run WHERE run_id = %(run_id)s FOR SHARE;

-- name: lock_groups
SELECT group_id FROM rft.rollout_group WHERE group_id = ANY (%(group_ids)s) ORDER BY group_id FOR UPDATE;

-- name: still_claimed
-- Groups whose verdicts may be committed: a relabel in between took the claim away.
SELECT item_id AS group_id FROM rft.worklist
WHERE consumer = 'pipeline/' || %(run_id)s AND item_kind = 'group' AND item_id = ANY (%(group_ids)s)
  AND claimed_by = %(worker_id)s AND NOT available
FOR UPDATE;

-- name: finish_pipeline_items
DELETE FROM rft.worklist WHERE consumer = 'pipeline/' || %(run_id)s AND item_kind = 'group' AND item_id = ANY (%(group_ids)s);

-- name: close_groups
-- Dropped whole: the place goes back to the planner, which counts only groups that can still train.
UPDATE rft.rollout_group g SET status = 'ready', ready_at = clock_timestamp(), trainable = false, closed_reason = c.reason
FROM unnest(%(group_ids)s::bigint[], %(reasons)s::text[]) AS c (group_id, reason) WHERE g.group_id = c.group_id;

-- name: ready_groups
-- Kept: drawable, at the place that the run's sampler gives them.
SELECT rft.ready_groups(%(group_ids)s::bigint[], %(priorities)s::float8[]);
