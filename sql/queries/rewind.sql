-- name: kept_steps (read)
-- Steps of an attempt's history whose checkpoints still have their files.
SELECT DISTINCT c.trainer_step FROM rft.v_attempt_history h
JOIN rft.checkpoint c ON c.attempt_id = h.attempt_id AND (h.last_step IS NULL OR c.trainer_step <= h.last_step)
WHERE h.history_id = %(attempt_id)s AND c.deleted_at IS NULL ORDER BY c.trainer_step;

-- name: lock_groups_to_leave
-- Lock groups in a separate statement, so that the next one sees what the previous lock holders did, such as a relabel.
SELECT count(*) AS n FROM (
    SELECT FROM rft.rollout_group
    WHERE run_id = %(run_id)s AND planned_policy_step >= %(step)s AND left_by IS NULL ORDER BY group_id FOR UPDATE) locked;

-- name: leave_groups
-- Leave the groups planned after the step that the run goes back to. They stay stored, but are not claimed, decided on or drawn.
WITH locked AS (
    SELECT group_id FROM rft.rollout_group
    WHERE run_id = %(run_id)s AND planned_policy_step >= %(step)s AND left_by IS NULL ORDER BY group_id FOR UPDATE),
gone AS (
    UPDATE rft.rollout_group g
    SET left_by = %(attempt_id)s, trainable = false, closed_reason = 'the run went back to step ' || %(step)s::integer, aged_out = false,
        status = CASE WHEN status IN ('planned', 'claimed') THEN 'abandoned' ELSE status END,
        claimed_by = NULL, lease_until = NULL, claim_token = claim_token + 1
    FROM locked l WHERE g.group_id = l.group_id RETURNING g.group_id, g.run_id, g.attempt_id, g.ordinal, g.task_id),
undecided AS (
    DELETE FROM rft.worklist w USING gone
    WHERE w.run_id = gone.run_id AND w.consumer = 'pipeline' AND w.item_kind = 'group' AND w.item_id = gone.group_id),
unfinished AS (DELETE FROM rft.partial_tokens p USING gone WHERE p.group_id = gone.group_id),
seen AS (
    -- Selectors no longer learn from them.
    UPDATE rft.task_observation o SET applied = true, applied_in = NULL, applied_seq = NULL FROM gone
    WHERE o.run_id = gone.run_id AND o.task_id = gone.task_id AND o.attempt_id = gone.attempt_id AND o.ordinal = gone.ordinal)
UPDATE rft.worklist w SET available = false FROM gone
WHERE w.run_id = gone.run_id AND w.consumer = 'trainer' AND w.item_kind = 'group' AND w.item_id = gone.group_id;

-- name: cut_partial_tokens
-- Of unfinished answers for groups that are kept, delete what was sampled from the first token of an undone policy on, so that it is not continued.
WITH undone AS (
    SELECT DISTINCT ON (p.group_id, p.rollout_index, p.generation_index) p.group_id, p.rollout_index, p.generation_index, p.claim_token, p.first_token
    FROM rft.rollout_group g JOIN rft.partial_tokens p USING (group_id)
    WHERE g.run_id = %(run_id)s AND g.status IN ('planned', 'claimed') AND EXISTS (
        SELECT FROM rft.policy_version v WHERE v.policy_version_id = ANY (p.policy_version_ids) AND v.trainer_step > %(step)s)
    ORDER BY p.group_id, p.rollout_index, p.generation_index, p.claim_token, p.first_token)
DELETE FROM rft.partial_tokens p USING undone u
WHERE (p.group_id, p.rollout_index, p.generation_index) = (u.group_id, u.rollout_index, u.generation_index)
  AND (p.claim_token, p.first_token) >= (u.claim_token, u.first_token);

-- name: insert_selector_snapshot
-- Taken before the first group is planned at a policy step. Older snapshots are deleted with the checkpoints that they belong to.
WITH old AS (
    DELETE FROM rft.selector_snapshot s
    WHERE s.run_id = %(run_id)s
      AND s.policy_step < (SELECT min(c.trainer_step) FROM rft.checkpoint c WHERE c.run_id = %(run_id)s AND c.deleted_at IS NULL))
INSERT INTO rft.selector_snapshot (run_id, policy_step, states)
SELECT %(run_id)s, %(policy_step)s,
       coalesce((SELECT jsonb_object_agg(taskset, jsonb_build_object('selector', selector, 'state', state))
                 FROM rft.selector_state WHERE run_id = %(run_id)s), '{}')
ON CONFLICT (run_id, policy_step) DO NOTHING;

-- name: snapshot_from_step (read)
-- The selectors' state before anything was planned at this policy step or a later one; no row if nothing was.
SELECT snapshot_id, states FROM rft.selector_snapshot
WHERE run_id = %(run_id)s AND policy_step >= %(step)s ORDER BY snapshot_id LIMIT 1;

-- name: restore_selectors
-- Reset the selectors of a run to a snapshot: what they learned since then counts as not seen.
WITH later AS (
    DELETE FROM rft.selector_snapshot WHERE run_id = %(run_id)s AND snapshot_id >= %(snapshot_id)s),
unseen AS (
    UPDATE rft.task_observation o SET applied = false, applied_in = NULL, applied_seq = NULL
    WHERE o.run_id = %(run_id)s AND o.applied_in >= %(snapshot_id)s)
UPDATE rft.selector_state s SET selector = n.value ->> 'selector', state = n.value -> 'state', updated_at = clock_timestamp()
FROM jsonb_each(%(states)s) n WHERE s.run_id = %(run_id)s AND s.taskset = n.key;

-- name: forget_selectors
-- Delete selectors that had no state at the snapshot.
DELETE FROM rft.selector_state WHERE run_id = %(run_id)s AND NOT %(states)s::jsonb ? taskset;

-- name: rebuild_task_stat
-- Fold the outcomes of a run's tasks again; return the number of tasks written.
SELECT rft.rebuild_task_stat(%(run_id)s) AS tasks;

-- name: copy_selectors
-- Give a fork's selectors the state of its parent's, from the snapshot or current.
INSERT INTO rft.selector_state (run_id, taskset, selector, state)
SELECT %(run_id)s, key, value ->> 'selector', value -> 'state'
FROM jsonb_each(coalesce(%(states)s::jsonb,
    (SELECT jsonb_object_agg(taskset, jsonb_build_object('selector', selector, 'state', state))
     FROM rft.selector_state WHERE run_id = %(parent_run_id)s), '{}'));

-- name: copy_observations
-- Copy the outcomes with which a fork's selectors and statistics begin. Those that the parent's selector had not seen at the snapshot are
-- new to the fork's.
INSERT INTO rft.task_observation (run_id, attempt_id, ordinal, task_id, kind, successes, trials, applied, applied_seq, author, session_user_name, reason,
    observed_at)
SELECT %(run_id)s, CASE WHEN o.ordinal IS NOT NULL THEN %(attempt_id)s::bigint END, o.ordinal, o.task_id, o.kind, o.successes, o.trials,
       s.seen, CASE WHEN s.seen THEN o.applied_seq END, o.author, o.session_user_name, o.reason,
       o.observed_at
FROM rft.task_observation o
LEFT JOIN rft.rollout_group g ON g.run_id = o.run_id AND g.attempt_id = o.attempt_id AND g.ordinal = o.ordinal
CROSS JOIN LATERAL (SELECT o.applied AND coalesce(o.applied_in < %(snapshot_id)s, true) AS seen) s
WHERE o.run_id = %(parent_run_id)s AND g.left_by IS NULL AND (%(keep_rollouts)s OR coalesce(g.planned_policy_step < %(step)s, true))
ORDER BY o.observation_id;

-- name: copy_sampler
-- Copy the parent's sampling policy to a fork, until the fork's first attempt sets another. Its counts start again, in another epoch.
WITH lanes AS (
    INSERT INTO rft.sampler_lane
    SELECT (jsonb_populate_record(NULL::rft.sampler_lane, to_jsonb(l) || jsonb_build_object('run_id', %(run_id)s))).*
    FROM rft.sampler_lane l WHERE l.run_id = %(parent_run_id)s)
INSERT INTO rft.sampler
SELECT (jsonb_populate_record(NULL::rft.sampler, to_jsonb(s) || jsonb_build_object('run_id', %(run_id)s, 'epoch', s.epoch + 1, 'num_inserted', 0))).*
FROM rft.sampler s WHERE s.run_id = %(parent_run_id)s;

-- name: copy_groups
-- Copy whole groups that the fork's history has not drawn: the same arrays, each experience with its origin as parent. The copies are sealed,
-- so the fork's pipeline decides on them. The originals are locked, so that a purge (which locks them too) sees every copy. Ids of copies are chosen
-- first, because the planner, which expects one row of each WITH query, would find them by comparing every copy with every original.
WITH source AS (
    SELECT g.* FROM rft.rollout_group g
    WHERE g.run_id = %(parent_run_id)s AND g.left_by IS NULL AND g.status IN ('sealed', 'ready')
      AND (g.trainable OR g.aged_out) AND (%(keep_rollouts)s OR coalesce(g.planned_policy_step < %(step)s, true))
      AND NOT EXISTS (
          SELECT FROM rft.draw d
          JOIN rft.v_attempt_history h ON h.history_id = %(attempt_id)s AND h.attempt_id = d.attempt_id
              AND (h.last_step IS NULL OR d.trainer_step <= h.last_step)
          WHERE d.item_kind = 'group' AND d.item_id = g.group_id)
    ORDER BY g.group_id FOR KEY SHARE OF g),
copied AS MATERIALIZED (
    SELECT *, nextval(pg_get_serial_sequence('rft.rollout_group', 'group_id')) AS copy_id FROM source),
groups AS (
    INSERT INTO rft.rollout_group (group_id, run_id, attempt_id, ordinal, task_id, explore_step, group_size, source, status, is_refill,
        planned_policy_step, planned_at, sealed_at, is_adopted)
    SELECT copy_id, %(run_id)s, %(attempt_id)s, ordinal, task_id, explore_step, group_size, source, 'sealed', is_refill, planned_policy_step,
           planned_at, sealed_at, is_adopted
    FROM copied),
prompts AS (
    INSERT INTO rft.group_prompt (group_id, prompt_digest, prompt, messages)
    SELECT c.copy_id, o.prompt_digest, o.prompt, o.messages
    FROM copied c CROSS JOIN LATERAL (SELECT * FROM rft.group_prompt WHERE group_id = c.group_id OFFSET 0) o),
baselines AS (
    INSERT INTO rft.group_baseline
    SELECT (jsonb_populate_record(NULL::rft.group_baseline, to_jsonb(b) || jsonb_build_object('group_id', c.copy_id))).*
    FROM copied c CROSS JOIN LATERAL (SELECT * FROM rft.group_baseline WHERE group_id = c.group_id OFFSET 0) b),
copied_rollouts AS MATERIALIZED (
    SELECT c.copy_id AS copy_group_id, o.*, nextval(pg_get_serial_sequence('rft.rollout', 'rollout_id')) AS copy_id
    FROM copied c CROSS JOIN LATERAL (SELECT * FROM rft.rollout WHERE group_id = c.group_id ORDER BY rollout_id OFFSET 0) o),
rollouts AS (
    INSERT INTO rft.rollout (rollout_id, group_id, rollout_index, outcome, reward, num_turns, seconds, error, stop_reason, tries)
    SELECT copy_id, copy_group_id, rollout_index, outcome, reward, num_turns, seconds, error, stop_reason, tries FROM copied_rollouts),
experiences AS (
    INSERT INTO rft.experience (run_id, group_id, rollout_id, turn_index, source, parent_id, prompt_digest, response, response_messages,
        reward_sampled, reward, reward_final, reward_parts, metrics, policy_version_min, policy_version_max, num_prompt_tokens, num_response_tokens,
        num_trained_tokens, num_turns, fork, role, finish_reason, segment_id, segment_row)
    SELECT %(run_id)s, o.copy_group_id, o.copy_id, e.turn_index, e.source, e.experience_id, e.prompt_digest, e.response, e.response_messages,
           e.reward_sampled, e.reward, e.reward_final, e.reward_parts, e.metrics, e.policy_version_min, e.policy_version_max, e.num_prompt_tokens,
           e.num_response_tokens, e.num_trained_tokens, e.num_turns, e.fork, e.role, e.finish_reason, e.segment_id, e.segment_row
    FROM copied_rollouts o
    CROSS JOIN LATERAL (SELECT * FROM rft.experience WHERE group_id = o.group_id AND rollout_id = o.rollout_id OFFSET 0) e
    ORDER BY e.experience_id)
SELECT copy_id AS group_id, status::text AS status FROM copied ORDER BY copy_id;

-- name: copy_turn_rewards
-- Copy the rewards of turns of the origins of a fork's experiences, as corrected by now. The origins' groups are locked, so no label comes between.
INSERT INTO rft.turn_reward (experience_id, turn, reward_sampled, reward)
SELECT e.experience_id, t.turn, t.reward_sampled, t.reward
FROM unnest(%(group_ids)s::bigint[]) AS i (group_id)
CROSS JOIN LATERAL (SELECT experience_id, parent_id FROM rft.experience WHERE group_id = i.group_id OFFSET 0) e
CROSS JOIN LATERAL (SELECT * FROM rft.turn_reward WHERE experience_id = e.parent_id OFFSET 0) t
ORDER BY e.experience_id, t.turn;

-- name: copy_annotations
-- Copy the annotations that stand about the origins of a fork's groups. The origins' groups are locked.
SELECT rft.copy_annotations(%(group_ids)s::bigint[]);

-- name: copy_scores
-- Copy the scores that stages found for the origins of a fork's experiences.
INSERT INTO rft.score
SELECT (jsonb_populate_record(NULL::rft.score, to_jsonb(s) || jsonb_build_object('experience_id', e.experience_id))).*
FROM rft.experience e JOIN rft.score s ON s.experience_id = e.parent_id
WHERE e.group_id = ANY (%(group_ids)s);

-- name: copy_reviews
-- Copy reviews of the origins that are answered or past their deadline. The fork's pipeline asks open ones itself.
INSERT INTO rft.review (experience_id, group_id, run_id, name, question, otherwise, answer, answer_id, author, session_user_name, asked_at, deadline,
    answered_at, kind, wanted, rule, least, passing)
SELECT e.experience_id, e.group_id, e.run_id, w.name, w.question, w.otherwise, w.answer, w.answer_id, w.author, w.session_user_name, w.asked_at,
       w.deadline, w.answered_at, w.kind, w.wanted, w.rule, w.least, w.passing
FROM rft.experience e JOIN rft.v_review w ON w.experience_id = e.parent_id
WHERE e.group_id = ANY (%(group_ids)s) AND w.state <> 'waiting';
