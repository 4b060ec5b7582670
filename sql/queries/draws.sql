-- name: draw_groups
-- Draw whole groups for a trainer step; return the outcome.
SELECT * FROM rft.draw_groups(%(run_id)s, %(attempt_id)s, %(step)s, %(wanted)s, %(max_refill)s, %(ahead)s);

-- name: drawn_rows (read)
-- The experiences drawn for a step, in slot order, with the place of their arrays.
SELECT d.slot, d.experience_id, d.pair_id, e.group_id, o.rollout_index, e.turn_index, e.role,
       (SELECT t.taskset FROM rft.rollout_group g JOIN rft.task t USING (task_id) WHERE g.group_id = e.group_id) AS taskset, d.reward_used AS reward,
       d.turn_rewards_used AS turn_rewards, d.staleness,
       coalesce(d.importance_weight, 1) AS importance_weight, b.reward AS baseline_reward, e.reward_parts, e.num_prompt_tokens, e.num_response_tokens,
       e.num_trained_tokens, e.segment_id, e.segment_row
FROM rft.draw d
JOIN rft.experience e USING (experience_id)
JOIN rft.rollout o USING (rollout_id)
LEFT JOIN rft.group_baseline b ON b.group_id = e.group_id
WHERE d.attempt_id = %(attempt_id)s AND d.trainer_step = %(step)s
ORDER BY d.slot;

-- name: drawn_groups_state (read)
-- Compare a step's draws with what a draw of the same groups would record now. outcome: same, changed (by a label, an answer, a verdict, a
-- purge or another pipeline of the run) or fenced (the attempt no longer holds the run).
WITH item AS MATERIALIZED (SELECT DISTINCT item_id FROM rft.draw WHERE attempt_id = %(attempt_id)s AND trainer_step = %(step)s)
SELECT CASE
    WHEN r.current_attempt_id IS DISTINCT FROM %(attempt_id)s THEN 'fenced'
    WHEN EXISTS (
        SELECT FROM item i JOIN rft.rollout_group g ON g.group_id = i.item_id
        WHERE g.status <> 'ready' OR NOT g.trainable
           OR (r.pipeline_version <> 'none'
               AND coalesce((SELECT max(v.label_cut) FROM rft.verdict v WHERE v.group_id = i.item_id AND v.pipeline_version = r.pipeline_version), -1)
                   < greatest((SELECT max(l.label_id) FROM rft.experience e JOIN rft.label l USING (experience_id) WHERE e.group_id = i.item_id),
                              (SELECT max(q.answer_id) FROM rft.review q WHERE q.group_id = i.item_id),
                              rft.newest_read_annotation(i.item_id, r.pipeline_version), 0)))
    OR EXISTS (
        SELECT FROM item i
        JOIN rft.experience e ON e.group_id = i.item_id
        LEFT JOIN rft.verdict v ON v.experience_id = e.experience_id AND v.newest_of = r.pipeline_version
        LEFT JOIN rft.draw d ON d.experience_id = e.experience_id AND d.attempt_id = %(attempt_id)s AND d.trainer_step = %(step)s
        WHERE coalesce(v.kept, r.pipeline_version = 'none') IS DISTINCT FROM (d.draw_id IS NOT NULL)
           OR (d.draw_id IS NOT NULL
               AND (d.reward_used IS DISTINCT FROM CASE WHEN e.reward_final THEN e.reward ELSE coalesce(v.reward, e.reward) END
                    OR d.turn_rewards_used IS DISTINCT FROM rft.turn_rewards_at(e.experience_id, NULL)))
           OR EXISTS (SELECT FROM rft.purged_experience x WHERE x.experience_id = e.experience_id))
        THEN 'changed'
    ELSE 'same' END AS outcome
FROM rft.run r WHERE r.run_id = %(run_id)s;

-- name: reopen_stale_groups
-- Return drawable groups to the pipeline if their verdicts belong to another pipeline than the run's, or are older than a label or an
-- answer that arrived while the group counted as drawn.
SELECT rft.reopen_groups(array_agg(w.item_id))
FROM rft.worklist w JOIN rft.run r ON w.run_id = r.run_id AND w.consumer = 'trainer'
WHERE r.run_id = %(run_id)s AND w.item_kind = 'group' AND (w.available OR w.resume_step IS NOT NULL)
  AND coalesce((SELECT max(v.label_cut) FROM rft.verdict v WHERE v.group_id = w.item_id AND v.pipeline_version = r.pipeline_version),
               CASE WHEN r.pipeline_version = 'none' THEN 0 ELSE -1 END)
      < greatest((SELECT max(l.label_id) FROM rft.experience e JOIN rft.label l USING (experience_id) WHERE e.group_id = w.item_id),
                 (SELECT max(q.answer_id) FROM rft.review q WHERE q.group_id = w.item_id),
                 rft.newest_read_annotation(w.item_id, r.pipeline_version), 0)
HAVING count(*) > 0;

-- name: final_draws (read)
-- One row if the draws of a step are part of the attempt's history for good: the step was recorded, or a checkpoint contains it.
SELECT t.trainer_step AS recorded, c.trainer_step AS checkpoint
FROM (SELECT 1) o
LEFT JOIN rft.train_step t ON t.attempt_id = %(attempt_id)s AND t.trainer_step = %(step)s
LEFT JOIN LATERAL (
    SELECT trainer_step FROM rft.checkpoint WHERE attempt_id = %(attempt_id)s AND trainer_step >= %(step)s ORDER BY trainer_step LIMIT 1) c ON true
WHERE t.trainer_step IS NOT NULL OR c.trainer_step IS NOT NULL;

-- name: release_draws
-- Release a batch that was not used: its draws never took place. Groups are locked first, in the same order as by labels.
WITH locked AS (
    SELECT group_id FROM rft.rollout_group
    WHERE group_id IN (SELECT item_id FROM rft.draw WHERE attempt_id = %(attempt_id)s AND trainer_step = %(step)s)
    ORDER BY group_id FOR UPDATE),
gone AS (
    DELETE FROM rft.draw WHERE attempt_id = %(attempt_id)s AND trainer_step = %(step)s
        AND item_id IN (SELECT group_id FROM locked) RETURNING item_id, draw_key),
state AS (DELETE FROM rft.sampler_step WHERE attempt_id = %(attempt_id)s AND trainer_step = %(step)s),
batch AS (DELETE FROM rft.batch WHERE attempt_id = %(attempt_id)s AND trainer_step = %(step)s)
UPDATE rft.worklist w
SET available = g.status = 'ready' AND g.trainable, times_sampled = w.times_sampled - 1, resume_step = NULL,
    lane = coalesce(n.lane, ''), draw_key = coalesce(d.draw_key, w.draw_key)
FROM (SELECT item_id, min(draw_key) AS draw_key FROM gone GROUP BY item_id) d
JOIN rft.rollout_group g ON g.group_id = d.item_id
JOIN rft.task t USING (task_id)
LEFT JOIN rft.worklist before ON before.run_id = g.run_id AND before.consumer = 'trainer' AND before.item_kind = 'group' AND before.item_id = d.item_id
LEFT JOIN LATERAL rft.lane_of(g.run_id, g.source, t.taskset, before.times_sampled - 1) n ON true
WHERE w.run_id = %(run_id)s AND w.consumer = 'trainer' AND w.item_kind = 'group' AND w.item_id = d.item_id
RETURNING w.item_id;

-- name: count_uses
-- Count the draws of the experiences of some groups again.
SELECT rft.count_uses(%(run_id)s, %(group_ids)s::bigint[]);

-- name: supersede_before_damage
-- The verdicts that drop_damaged_groups replaces no longer count. Its condition, so that repeating both changes nothing.
SELECT rft.supersede_verdicts(array_agg(e.experience_id), r.pipeline_version)
FROM unnest(%(group_ids)s::bigint[], %(reasons)s::text[]) AS d (group_id, reason)
JOIN rft.rollout_group g USING (group_id)
JOIN rft.experience e USING (group_id)
JOIN rft.run r ON r.run_id = %(run_id)s
WHERE g.closed_reason IS DISTINCT FROM 'dropped by storage: ' || d.reason AND e.experience_id = ANY (%(experience_ids)s)
GROUP BY r.pipeline_version;

-- name: drop_damaged_groups
-- Make groups undrawable whose arrays cannot be read, so that the planner replaces them. The experiences in the damaged segments get
-- a verdict. Once the file is restored, `rft.reopen_groups` admits the groups again. Repeating the statement adds nothing.
WITH lost AS (
    SELECT g.group_id, g.run_id, d.reason FROM unnest(%(group_ids)s::bigint[], %(reasons)s::text[]) AS d (group_id, reason)
    JOIN rft.rollout_group g USING (group_id)
    WHERE g.closed_reason IS DISTINCT FROM 'dropped by storage: ' || d.reason),
off AS (
    UPDATE rft.worklist w SET available = false FROM lost l
    WHERE w.run_id = l.run_id AND w.consumer = 'trainer' AND w.item_kind = 'group' AND w.item_id = l.group_id),
noted AS (
    INSERT INTO rft.verdict (experience_id, group_id, pipeline_version, kept, stage, reason, label_cut)
    SELECT e.experience_id, e.group_id, r.pipeline_version, false, 'storage', l.reason,
           greatest((SELECT max(label_id) FROM rft.label n WHERE n.experience_id = e.experience_id),
                    (SELECT max(answer_id) FROM rft.review q WHERE q.experience_id = e.experience_id), 0)
    FROM rft.experience e JOIN lost l USING (group_id) JOIN rft.run r ON r.run_id = %(run_id)s
    WHERE e.experience_id = ANY (%(experience_ids)s))
UPDATE rft.rollout_group g SET trainable = false, closed_reason = 'dropped by storage: ' || l.reason
FROM lost l WHERE g.group_id = l.group_id;

-- name: experience_addresses (read)
-- Segment and row of the arrays of experiences.
SELECT experience_id, segment_id, segment_row FROM rft.experience WHERE experience_id = ANY (%(experience_ids)s);

-- name: insert_policy_version
-- Store a set of weights as published; return its id.
INSERT INTO rft.policy_version (run_id, attempt_id, trainer_step, method, uri, num_bytes, checksum)
VALUES (%(run_id)s, %(attempt_id)s, %(trainer_step)s, %(method)s, %(uri)s, %(num_bytes)s, %(checksum)s)
RETURNING policy_version_id;

-- name: policy_version_after (read)
-- The newest version that an attempt published for a step after a given version.
SELECT policy_version_id FROM rft.policy_version
WHERE attempt_id = %(attempt_id)s AND trainer_step = %(trainer_step)s AND policy_version_id > %(after)s::bigint
ORDER BY policy_version_id DESC LIMIT 1;

-- name: newest_policy (read)
-- The newest weights that the current attempt of a run has published.
SELECT p.* FROM rft.policy_version p JOIN rft.run r ON r.run_id = p.run_id AND r.current_attempt_id = p.attempt_id
WHERE p.run_id = %(run_id)s ORDER BY p.policy_version_id DESC LIMIT 1;

-- name: insert_train_step
-- Store what a step of an attempt did and measured.
INSERT INTO rft.train_step (attempt_id, trainer_step, run_id, outcome, reason, num_groups, num_experiences, num_tokens,
    wait_seconds, train_seconds, publish_seconds, metrics)
VALUES (%(attempt_id)s, %(trainer_step)s, %(run_id)s, %(outcome)s, %(reason)s, %(num_groups)s, %(num_experiences)s, %(num_tokens)s,
    %(wait_seconds)s, %(train_seconds)s, %(publish_seconds)s, %(metrics)s)
RETURNING attempt_id, trainer_step;

-- name: insert_role_baseline
-- Store the baseline of a role after a step of an attempt.
INSERT INTO rft.role_baseline (attempt_id, trainer_step, run_id, taskset, role, baseline, num_rollouts)
VALUES (%(attempt_id)s, %(trainer_step)s, %(run_id)s, %(taskset)s, %(role)s, %(baseline)s, %(num_rollouts)s);

-- name: role_baselines (read)
-- The newest baseline of each role on an attempt's history.
SELECT DISTINCT ON (b.taskset, b.role) b.taskset, b.role, b.baseline, b.num_rollouts
FROM rft.v_attempt_history h
JOIN rft.role_baseline b ON b.attempt_id = h.attempt_id AND (h.last_step IS NULL OR b.trainer_step <= h.last_step)
WHERE h.history_id = %(attempt_id)s
ORDER BY b.taskset, b.role, b.trainer_step DESC;

-- name: train_step_done (read)
-- One row if the attempt has finished the step.
SELECT attempt_id, trainer_step FROM rft.train_step WHERE attempt_id = %(attempt_id)s AND trainer_step = %(trainer_step)s;

-- name: insert_checkpoint
-- Commit a checkpoint; return its id.
INSERT INTO rft.checkpoint (run_id, attempt_id, trainer_step, policy_version_id, uri, num_bytes)
VALUES (%(run_id)s, %(attempt_id)s, %(trainer_step)s, %(policy_version_id)s, %(uri)s, %(num_bytes)s) RETURNING checkpoint_id;

-- name: checkpoint_after (read)
-- The newest checkpoint that an attempt committed for a step after a given checkpoint.
SELECT checkpoint_id FROM rft.checkpoint
WHERE attempt_id = %(attempt_id)s AND trainer_step = %(trainer_step)s AND checkpoint_id > %(after)s::bigint
ORDER BY checkpoint_id DESC LIMIT 1;

-- name: kept_checkpoints (read)
-- Checkpoints on an attempt's history whose files exist, newest first. waits: a validation of the step is still open. needed: the
-- checkpoint belongs to another run, or another run started from it or uses it as a model.
SELECT c.checkpoint_id, c.run_id, c.trainer_step, c.uri, c.policy_version_id,
       c.run_id <> a.run_id OR EXISTS (
           SELECT FROM rft.run_attempt f WHERE f.from_checkpoint_id = c.checkpoint_id AND f.run_id <> c.run_id)
           OR EXISTS (SELECT FROM rft.run_model m WHERE m.checkpoint_id = c.checkpoint_id AND m.run_id <> c.run_id) AS needed,
       EXISTS (SELECT FROM rft.evaluation e
               WHERE e.run_id = c.run_id AND e.trainer_step = c.trainer_step AND e.purpose = 'validation'
                 AND e.status IN ('planned', 'claimed')) AS waits
FROM rft.v_attempt_history h
JOIN rft.run_attempt a ON a.attempt_id = h.history_id
JOIN rft.checkpoint c ON c.attempt_id = h.attempt_id AND (h.last_step IS NULL OR c.trainer_step <= h.last_step)
WHERE h.history_id = %(attempt_id)s AND c.deleted_at IS NULL
ORDER BY c.trainer_step DESC, c.checkpoint_id DESC;

-- name: committed_checkpoints (read)
-- Checkpoints of a run, on any history, whose files must be kept.
SELECT uri FROM rft.checkpoint WHERE run_id = %(run_id)s AND deleted_at IS NULL;

-- name: forget_checkpoint
-- Mark a checkpoint whose files were removed.
UPDATE rft.checkpoint SET deleted_at = clock_timestamp() WHERE checkpoint_id = %(checkpoint_id)s;

-- name: first_policy (read)
-- The version published before the first step of a history.
SELECT p.* FROM rft.policy_version p JOIN rft.v_attempt_history h ON h.history_id = %(attempt_id)s AND h.attempt_id = p.attempt_id
WHERE p.run_id = %(run_id)s ORDER BY p.trainer_step, p.policy_version_id LIMIT 1;
