-- name: age_out
-- Groups too old for this step leave the worklist; their place goes back to the planner.
WITH locked AS (
    SELECT g.group_id FROM rft.worklist w JOIN rft.rollout_group g ON g.group_id = w.item_id
    WHERE w.consumer = 'trainer/' || %(run_id)s AND w.item_kind = 'group' AND w.available
      AND %(step)s - 1 - w.policy_step > %(max_staleness)s
    ORDER BY g.group_id FOR UPDATE OF g SKIP LOCKED),
old AS (
    UPDATE rft.worklist w SET available = false FROM locked l
    WHERE w.consumer = 'trainer/' || %(run_id)s AND w.item_kind = 'group' AND w.item_id = l.group_id AND w.available
    RETURNING w.item_id, w.policy_step)
UPDATE rft.rollout_group g
SET trainable = false,
    closed_reason = format('aged out: staleness %%s at step %%s, max_staleness %%s', %(step)s - 1 - o.policy_step, %(step)s::integer, %(max_staleness)s::integer)
FROM old o WHERE g.group_id = o.item_id;

-- name: pick_groups
-- Claim whole ready groups in first-in-first-out order. Those that a relabel holds at this moment are passed over.
SELECT item_id FROM rft.worklist
WHERE consumer = 'trainer/' || %(run_id)s AND item_kind = 'group' AND available AND sort_key < (%(explore_step)s + 1)::bigint << 32
  AND %(step)s - 1 - policy_step <= %(max_staleness)s
ORDER BY sort_key LIMIT %(num_groups)s FOR UPDATE SKIP LOCKED;

-- name: draw_groups
-- Take the groups picked and note every experience drawn, with its reward as it stands.
WITH taken AS (
    UPDATE rft.worklist w SET available = false
    WHERE w.consumer = 'trainer/' || %(run_id)s AND w.item_kind = 'group' AND w.item_id = ANY (%(group_ids)s)
    RETURNING w.item_id, w.sort_key, w.policy_step)
INSERT INTO rft.draw (attempt_id, trainer_step, slot, item_kind, item_id, experience_id, reward_used, staleness)
SELECT %(attempt_id)s, %(step)s, row_number() OVER (ORDER BY p.sort_key, o.rollout_index, e.turn_index) - 1, 'group', p.item_id,
       e.experience_id, CASE WHEN e.reward_final THEN e.reward ELSE coalesce(v.reward, e.reward) END,
       CASE WHEN p.policy_step = 2147483647 THEN 0 ELSE %(step)s - 1 - p.policy_step END
FROM taken p
JOIN rft.experience e ON e.group_id = p.item_id
JOIN rft.rollout o USING (rollout_id)
JOIN LATERAL (
    SELECT v.kept, v.reward FROM rft.verdict v
    WHERE v.experience_id = e.experience_id AND v.pipeline_version = %(pipeline_version)s
    ORDER BY v.verdict_id DESC LIMIT 1) v ON v.kept;

-- name: drawn_rows
SELECT d.slot, d.experience_id, d.item_id AS group_id, o.rollout_index, e.turn_index, d.reward_used AS reward, d.staleness,
       e.num_prompt_tokens, e.num_response_tokens, e.segment_id, e.segment_row
FROM rft.draw d
JOIN rft.experience e USING (experience_id)
JOIN rft.rollout o USING (rollout_id)
WHERE d.attempt_id = %(attempt_id)s AND d.trainer_step = %(step)s
ORDER BY d.slot;

-- name: groups_drawn
SELECT count(DISTINCT item_id) AS num_groups FROM rft.draw WHERE attempt_id = %(attempt_id)s AND trainer_step = %(step)s;

-- name: reopen_stale_groups
-- Drawable groups whose verdicts are not of the run's pipeline, or were made before a label that came while the group counted
-- as drawn: the pipeline decides on them again.
SELECT rft.reopen_groups(array_agg(w.item_id))
FROM rft.worklist w JOIN rft.run r ON w.consumer = 'trainer/' || r.run_id
WHERE r.run_id = %(run_id)s AND w.item_kind = 'group' AND w.available
  AND coalesce((SELECT max(v.label_cut) FROM rft.verdict v WHERE v.group_id = w.item_id AND v.pipeline_version = r.pipeline_version), -1)
      < coalesce((SELECT max(l.label_id) FROM rft.experience e JOIN rft.label l USING (experience_id) WHERE e.group_id = w.item_id), 0)
HAVING count(*) > 0;

-- name: release_draws
-- A batch given back before it was used: its draws never took place.
WITH gone AS (
    DELETE FROM rft.draw WHERE attempt_id = %(attempt_id)s AND trainer_step = %(step)s RETURNING item_id)
UPDATE rft.worklist w SET available = true
FROM (SELECT DISTINCT item_id FROM gone) g
WHERE w.consumer = 'trainer/' || %(run_id)s AND w.item_kind = 'group' AND w.item_id = g.item_id;

-- name: segment_addresses
SELECT s.segment_id, f.uri, s.offset_bytes, s.length_bytes, s.checksum
FROM rft.segment s JOIN rft.segment_file f USING (file_id) WHERE s.segment_id = ANY (%(segment_ids)s);

-- name: all_segments
SELECT s.segment_id, f.uri, s.offset_bytes, s.length_bytes, s.num_rows, s.checksum
FROM rft.segment s JOIN rft.segment_file f USING (file_id) ORDER BY s.segment_id;

-- name: dangling_references
SELECT e.experience_id, e.segment_id, e.segment_row FROM rft.experience e LEFT JOIN rft.segment s USING (segment_id)
WHERE s.segment_id IS NULL OR e.segment_row >= s.num_rows ORDER BY e.experience_id LIMIT 1000;

-- name: experience_addresses
SELECT experience_id, segment_id, segment_row FROM rft.experience WHERE experience_id = ANY (%(experience_ids)s);

-- name: insert_policy_version
INSERT INTO rft.policy_version (run_id, attempt_id, trainer_step, method, uri, num_bytes, checksum)
VALUES (%(run_id)s, %(attempt_id)s, %(trainer_step)s, %(method)s, %(uri)s, %(num_bytes)s, %(checksum)s)
RETURNING policy_version_id;

-- name: newest_policy
SELECT p.* FROM rft.policy_version p JOIN rft.run r ON r.run_id = p.run_id AND r.current_attempt_id = p.attempt_id
WHERE p.run_id = %(run_id)s ORDER BY p.policy_version_id DESC LIMIT 1;

-- name: insert_train_step
INSERT INTO rft.train_step (attempt_id, trainer_step, run_id, outcome, reason, num_groups, num_experiences, num_tokens,
    wait_seconds, train_seconds, publish_seconds, metrics)
VALUES (%(attempt_id)s, %(trainer_step)s, %(run_id)s, %(outcome)s, %(reason)s, %(num_groups)s, %(num_experiences)s, %(num_tokens)s,
    %(wait_seconds)s, %(train_seconds)s, %(publish_seconds)s, %(metrics)s);

-- name: insert_checkpoint
INSERT INTO rft.checkpoint (run_id, attempt_id, trainer_step, policy_version_id, uri, num_bytes)
VALUES (%(run_id)s, %(attempt_id)s, %(trainer_step)s, %(policy_version_id)s, %(uri)s, %(num_bytes)s) RETURNING checkpoint_id;

-- name: kept_checkpoints
-- Checkpoints on an attempt's history whose files are there, newest first, with the validation score of their step.
SELECT c.checkpoint_id, c.trainer_step, c.uri, c.policy_version_id, e.mean_reward
FROM rft.v_history h
JOIN rft.checkpoint c ON c.attempt_id = h.attempt_id AND (h.last_step IS NULL OR c.trainer_step <= h.last_step)
LEFT JOIN LATERAL (
    SELECT avg(e.mean_reward) AS mean_reward FROM rft.evaluation e
    JOIN rft.policy_version p USING (policy_version_id)
    JOIN rft.v_history h2 ON h2.history_id = h.history_id AND h2.attempt_id = p.attempt_id AND (h2.last_step IS NULL OR p.trainer_step <= h2.last_step)
    WHERE e.run_id = c.run_id AND e.trainer_step = c.trainer_step AND e.purpose = 'validation' AND e.decoding = %(decoding)s AND e.status = 'done'
) e ON true
WHERE h.history_id = %(attempt_id)s AND c.deleted_at IS NULL
ORDER BY c.trainer_step DESC, c.checkpoint_id DESC;

-- name: forget_checkpoint
UPDATE rft.checkpoint SET deleted_at = clock_timestamp() WHERE checkpoint_id = %(checkpoint_id)s;

-- name: first_policy
-- The version published before the first step of a history.
SELECT p.* FROM rft.policy_version p JOIN rft.v_history h ON h.history_id = %(attempt_id)s AND h.attempt_id = p.attempt_id
WHERE p.run_id = %(run_id)s ORDER BY p.trainer_step, p.policy_version_id LIMIT 1;
