-- name: claim_sealed_groups
-- Claim sealed groups for a pipeline worker. `from_key` is a hint (see queue.SealedQueue). Rows are found by their places, which stay while they are locked: a join, and before
-- PostgreSQL 17 item_id = ANY (…) as well, would read the whole queue, including the dead rows that an open snapshot retains. A row that
-- another session changes meanwhile is left for the next claim. A group on which a worker crashed comes alone, and only with `suspects`.
-- A worker that was recorded as gone claims nothing; the lock makes that record wait for a claim, which is then released with the others.
WITH me AS MATERIALIZED (
    SELECT bool_and(stopped_at IS NULL) IS NOT FALSE AS works
    FROM (SELECT stopped_at FROM rft.worker WHERE worker_id = %(worker_id)s FOR SHARE) w),
suspect AS (
    SELECT ctid AS place FROM rft.worklist
    WHERE %(suspects)s AND run_id = %(run_id)s AND consumer = 'pipeline' AND available AND times_sampled = 0 AND num_lost > 0 AND (SELECT works FROM me)
    ORDER BY sort_key LIMIT 1 FOR UPDATE SKIP LOCKED),
others AS (
    SELECT ctid AS place FROM rft.worklist
    WHERE run_id = %(run_id)s AND consumer = 'pipeline' AND available AND times_sampled = 0 AND num_lost = 0 AND sort_key >= %(from_key)s
      AND (SELECT works FROM me) AND NOT EXISTS (SELECT FROM suspect)
    ORDER BY sort_key LIMIT %(count)s FOR UPDATE SKIP LOCKED),
picked AS (SELECT place FROM others UNION ALL SELECT place FROM suspect)
UPDATE rft.worklist w SET available = false, claimed_by = %(worker_id)s, lease_until = rft.clock() + %(lease_s)s * interval '1 s'
WHERE w.ctid = ANY (ARRAY(SELECT place FROM picked))
RETURNING w.item_id AS group_id, w.sort_key, w.num_lost;

-- name: release_items
-- Release the groups of a claim whose answer the pipeline worker never received.
UPDATE rft.worklist SET available = true, claimed_by = NULL, lease_until = NULL
WHERE run_id = %(run_id)s AND consumer = 'pipeline' AND claimed_by = %(worker_id)s AND NOT available;

-- name: batch_of_groups
-- The columns that stages see of an experience. Long texts are sent only if a stage reads them (`columns`). screened: why an explorer
-- stopped its group after the first rollouts. baseline_error: why its group has no baseline, if one was to be sampled.
SELECT e.experience_id, e.group_id, o.rollout_index, e.turn_index, g.task_id, t.taskset, t.payload ->> 'answer' AS answer,
       CASE WHEN 'prompt' = ANY (%(columns)s) THEN gp.prompt END AS prompt,
       CASE WHEN 'response' = ANY (%(columns)s) THEN e.response END AS response,
       e.reward, e.reward_sampled, e.num_prompt_tokens, e.num_response_tokens, e.num_trained_tokens, e.num_turns, e.role, e.finish_reason,
       e.metrics::text AS metrics, e.source::text AS source,
       CASE WHEN 'messages' = ANY (%(columns)s) THEN rft.chat(gp.messages, e.response_messages, e.response)::text END AS messages,
       e.reward_parts::text AS reward_parts,
       CASE WHEN 'metadata' = ANY (%(columns)s) THEN (t.payload -> 'metadata')::text END AS metadata,
       CASE WHEN 'features' = ANY (%(columns)s) THEN t.features::text END AS features, e.parent_id,
       CASE WHEN 'staleness' = ANY (%(columns)s) THEN (
           SELECT n.trainer_step - p.trainer_step FROM rft.policy_version p WHERE p.policy_version_id = e.policy_version_min)
       END AS staleness,
       -- A fork's copy has the corrected rewards, but no label.
       l.label_cut > 0 OR e.reward_final OR e.reward IS DISTINCT FROM e.reward_sampled OR EXISTS (
           SELECT FROM rft.turn_reward w WHERE w.experience_id = e.experience_id AND w.reward <> w.reward_sampled) AS labelled,
       CASE WHEN 'reviews' = ANY (%(columns)s) THEN (
           SELECT jsonb_object_agg(w.name, w.state)::text FROM rft.v_review w WHERE w.experience_id = e.experience_id)
       END AS reviews,
       (SELECT min(c.error) FROM rft.rollout c
        WHERE c.group_id = e.group_id AND c.outcome = 'cancelled' AND c.error LIKE 'screened out: %%') AS screened,
       (SELECT format('the greedy rollout %%s: %%s', b.outcome, b.error) FROM rft.group_baseline b
        WHERE b.group_id = e.group_id AND b.outcome <> 'ok') AS baseline_error,
       g.group_size, o.outcome::text AS outcome, o.error, greatest(l.label_cut, a.answer_cut) AS label_cut
FROM rft.experience e
JOIN rft.rollout_group g USING (group_id)
JOIN rft.rollout o USING (rollout_id)
JOIN rft.task t USING (task_id)
LEFT JOIN rft.group_prompt gp ON gp.group_id = e.group_id AND gp.prompt_digest = e.prompt_digest
    AND ('prompt' = ANY (%(columns)s) OR 'messages' = ANY (%(columns)s))
CROSS JOIN LATERAL (
    SELECT coalesce(max(l.label_id), 0) AS label_cut FROM rft.label l WHERE l.experience_id = e.experience_id) l
CROSS JOIN LATERAL (SELECT max(w.answer_id) AS answer_cut FROM rft.review w WHERE w.experience_id = e.experience_id) a
LEFT JOIN LATERAL (
    SELECT p.trainer_step FROM rft.run r JOIN rft.policy_version p ON p.run_id = r.run_id
        AND p.attempt_id = CASE WHEN %(as_sealed)s THEN g.attempt_id ELSE r.current_attempt_id END
    WHERE 'staleness' = ANY (%(columns)s) AND r.run_id = g.run_id AND (NOT %(as_sealed)s OR p.published_at <= g.sealed_at)
    ORDER BY p.policy_version_id DESC LIMIT 1) n ON true
WHERE e.group_id = ANY (%(group_ids)s)
ORDER BY g.explore_step, g.ordinal, o.rollout_index, e.turn_index;

-- name: pipeline_of_run
-- The name and the pipeline of a run. FOR SHARE: the pipeline does not change while verdicts are committed.
SELECT name, pipeline_version FROM rft.run WHERE run_id = %(run_id)s FOR SHARE;

-- name: lock_groups
-- Lock groups in the order that all other statements use.
SELECT group_id FROM rft.rollout_group WHERE group_id = ANY (%(group_ids)s) ORDER BY group_id FOR UPDATE;

-- name: purged_groups
-- Return the groups with a purged experience. The caller has locked them.
SELECT g.group_id FROM rft.rollout_group g
WHERE g.group_id = ANY (%(group_ids)s) AND g.status = 'abandoned' AND EXISTS (
    SELECT FROM rft.experience e JOIN rft.purged_experience x USING (experience_id) WHERE e.group_id = g.group_id);

-- name: supersede_verdicts
-- Mark the verdicts of a version on experiences as superseded: new ones follow. The caller has locked the groups.
SELECT rft.supersede_verdicts(%(experience_ids)s::bigint[], %(pipeline_version)s);

-- name: still_claimed
-- Groups whose verdicts may be committed. A relabel in between removes the claim. (Looked up by key, one after the other: see
-- claim_sealed_groups. coalesce keeps PostgreSQL from the index of claims, which holds every claim that a snapshot can still see.)
SELECT w.item_id AS group_id FROM unnest(%(group_ids)s::bigint[]) AS g (group_id)
CROSS JOIN LATERAL (
    SELECT item_id FROM rft.worklist
    WHERE run_id = %(run_id)s AND consumer = 'pipeline' AND item_kind = 'group' AND item_id = g.group_id
      AND coalesce(claimed_by, 0) = %(worker_id)s AND NOT available
    FOR UPDATE) w;

-- name: finish_pipeline_items
-- Remove groups that were decided on, and that `still_claimed` has locked, from the pipeline's queue.
DELETE FROM rft.worklist
WHERE ctid = ANY (ARRAY(
    SELECT x.place FROM unnest(%(group_ids)s::bigint[]) AS g (group_id)
    CROSS JOIN LATERAL (
        SELECT ctid AS place FROM rft.worklist
        WHERE run_id = %(run_id)s AND consumer = 'pipeline' AND item_kind = 'group' AND item_id = g.group_id OFFSET 0) x));

-- name: close_groups
-- Close groups that were dropped whole. The planner, which counts only groups that can still train, replaces them.
UPDATE rft.rollout_group g SET status = 'ready', ready_at = clock_timestamp(), trainable = false, closed_reason = c.reason,
    decided_by = (SELECT pipeline_version FROM rft.run r WHERE r.run_id = g.run_id)
FROM unnest(%(group_ids)s::bigint[], %(reasons)s::text[]) AS c (group_id, reason) WHERE g.group_id = c.group_id;

-- name: ready_groups
-- Make kept groups drawable, at the place that the run's sampler gives them.
SELECT rft.ready_groups(%(group_ids)s::bigint[], %(priorities)s::float8[]);

-- name: stored_scores (read)
-- Scores that stages have already found for experiences.
SELECT r.row_id, s.score_key, s.input_digest, s.scores
FROM unnest(%(row_ids)s::bigint[]) AS r (row_id)
CROSS JOIN unnest(%(score_keys)s::text[]) AS k (score_key)
CROSS JOIN LATERAL (
    SELECT * FROM rft.score
    WHERE experience_id = r.row_id AND score_key = k.score_key AND error IS NULL AND input_digest IS NOT NULL OFFSET 0) s;

-- name: store_scores
-- Store the scores that stages found for experiences.
INSERT INTO rft.score AS s (experience_id, score_key, stage, scores, error, input_digest)
SELECT * FROM unnest(%(row_ids)s::bigint[], %(score_keys)s::text[], %(stages)s::text[], %(scores)s::jsonb[], %(errors)s::text[],
                     %(input_digests)s::bigint[]) AS n (experience_id, score_key, stage, scores, error, input_digest)
ORDER BY experience_id, score_key
ON CONFLICT (experience_id, score_key) DO UPDATE
SET scores = excluded.scores, error = excluded.error, input_digest = excluded.input_digest, scored_at = clock_timestamp()
WHERE (s.scores, s.error, s.input_digest) IS DISTINCT FROM (excluded.scores, excluded.error, excluded.input_digest);

-- name: ask_questions
-- Ask new questions. Existing ones stay unchanged, deadline and `otherwise` included. They are left out here instead of by ON CONFLICT,
-- which would wait for a session that is answering one, while that session waits for the group locked here. (Looked up by key, one after
-- the other: in the given order, whatever the planner's statistics.) The longest wait is ten years.
INSERT INTO rft.review (experience_id, group_id, run_id, name, question, deadline, otherwise, kind, wanted, rule, least, passing)
SELECT q.experience_id, q.group_id, %(run_id)s, q.name, q.question, rft.clock() + least(q.timeout_s, 315360000) * interval '1 s', q.otherwise,
       q.kind, q.wanted, q.rule, q.least, CASE WHEN q.passing IS NOT NULL THEN ARRAY(SELECT jsonb_array_elements_text(q.passing)) END
FROM unnest(%(experience_ids)s::bigint[], %(group_ids)s::bigint[], %(names)s::text[], %(questions)s::text[], %(timeouts)s::float8[],
            %(otherwise)s::rft.review_answer[], %(kinds)s::text[], %(wanted)s::integer[], %(rules)s::rft.answer_rule[], %(least)s::float8[],
            %(passing)s::jsonb[]) AS q (experience_id, group_id, name, question, timeout_s, otherwise, kind, wanted, rule, least, passing)
WHERE (SELECT w.review_id FROM rft.review w WHERE w.experience_id = q.experience_id AND w.name = q.name) IS NULL
ON CONFLICT (experience_id, name) DO NOTHING;

-- name: wait_for_answers
-- Let groups wait that `still_claimed` has locked, held by no worker. A group becomes available at its first deadline, or when one of
-- its questions is answered.
UPDATE rft.worklist w
SET available = false, claimed_by = NULL, lease_until = coalesce(
        (SELECT min(deadline) FROM rft.review r WHERE r.group_id = w.item_id AND r.answer IS NULL AND r.deadline > rft.clock()), rft.clock())
WHERE w.ctid = ANY (ARRAY(
    SELECT x.place FROM unnest(%(group_ids)s::bigint[]) AS g (group_id)
    CROSS JOIN LATERAL (
        SELECT ctid AS place FROM rft.worklist
        WHERE run_id = %(run_id)s AND consumer = 'pipeline' AND item_kind = 'group' AND item_id = g.group_id OFFSET 0) x));

-- name: end_waiting
-- Make groups available whose deadline has passed. A group locked by a label becomes available once the label is committed.
UPDATE rft.worklist w SET available = true, lease_until = NULL
WHERE w.ctid = ANY (ARRAY(
    SELECT ctid FROM rft.worklist
    WHERE run_id = %(run_id)s AND consumer = 'pipeline' AND NOT available AND claimed_by IS NULL AND lease_until <= rft.clock()
    FOR UPDATE SKIP LOCKED));

-- name: insert_tasks
-- Insert the tasks that the buffer does not have, in one order, so that workers that create the same tasks wait for each other instead of
-- deadlocking.
INSERT INTO rft.task (taskset, task_key, payload, features)
SELECT * FROM unnest(%(tasksets)s::text[], %(task_keys)s::text[], %(payloads)s::jsonb[], %(features)s::jsonb[])
    AS n (taskset, task_key, payload, features)
ORDER BY taskset, task_key
ON CONFLICT (taskset, task_key) DO NOTHING;

-- name: add_features
-- Add features to a task that is not purged.
UPDATE rft.task SET features = features || %(features)s
WHERE taskset = %(taskset)s AND task_key = %(task_key)s AND payload <> '{"purged": true}';

-- name: lock_parents
-- Lock the experiences from which new ones are made: a purge of them waits until the transaction has ended.
SELECT experience_id FROM rft.experience WHERE experience_id = ANY (%(experience_ids)s) ORDER BY experience_id FOR KEY SHARE;

-- name: purged_among (read)
-- Those of these experiences that were purged.
SELECT experience_id FROM rft.purged_experience WHERE experience_id = ANY (%(experience_ids)s) ORDER BY experience_id;

-- name: task_of_experience (read)
-- The task that an experience attempts.
SELECT t.taskset, t.task_key FROM rft.experience e JOIN rft.rollout_group g USING (group_id) JOIN rft.task t USING (task_id)
WHERE e.experience_id = %(experience_id)s;

-- name: register_pipeline
-- Store the stages of a pipeline version; return the digest under which it was first stored.
INSERT INTO rft.pipeline AS p (pipeline_version, digest, stages, label_kinds) VALUES (%(version)s, %(digest)s, %(stages)s, %(label_kinds)s)
ON CONFLICT (pipeline_version) DO UPDATE SET digest = p.digest RETURNING p.digest;
