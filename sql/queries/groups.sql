-- name: claim_groups
-- Claim groups of steps that may start at the policy of the explorer's engine (`policy_step`; up to `last_step`). A group on which two explorers crashed is a
-- suspect. It is sampled alone, so that it cannot take other groups with it: by an explorer that holds nothing, and that claims nothing
-- while it holds the suspect, and from the beginning, in case that what was sampled is the reason. While a suspect waits, explorers claim only groups of earlier steps, so that it gets its turn.
-- A worker that was recorded as gone claims nothing; the lock makes that record wait for a claim, which is then released with the others.
WITH me AS MATERIALIZED (
    SELECT bool_and(stopped_at IS NULL) IS NOT FALSE AS works
    FROM (SELECT stopped_at FROM rft.worker WHERE worker_id = %(worker_id)s FOR SHARE) w),
mine AS MATERIALIZED (
    SELECT count(*) AS num, bool_or(num_lost >= 2) AS alone FROM rft.rollout_group
    WHERE run_id = %(run_id)s AND status = 'claimed' AND claimed_by = %(worker_id)s),
waiting AS MATERIALIZED (
    SELECT explore_step FROM rft.rollout_group
    WHERE run_id = %(run_id)s AND status = 'planned' AND trainable AND explore_step <= %(last_step)s AND num_lost >= 2
    ORDER BY explore_step LIMIT 1),
others AS (
    SELECT group_id FROM rft.rollout_group
    WHERE run_id = %(run_id)s AND status = 'planned' AND trainable AND num_lost < 2
      AND explore_step <= least(%(last_step)s, (SELECT explore_step - 1 FROM waiting)) AND NOT coalesce((SELECT alone FROM mine), false) AND (SELECT works FROM me)
    ORDER BY explore_step, ordinal LIMIT %(count)s FOR UPDATE SKIP LOCKED),
suspect AS (
    SELECT group_id FROM rft.rollout_group
    WHERE run_id = %(run_id)s AND status = 'planned' AND trainable AND explore_step <= %(last_step)s AND num_lost >= 2
      AND (SELECT num FROM mine) = 0 AND (SELECT works FROM me) AND NOT EXISTS (SELECT FROM others)
    ORDER BY explore_step, ordinal LIMIT 1 FOR UPDATE SKIP LOCKED),
picked AS (SELECT group_id FROM suspect UNION ALL SELECT group_id FROM others)
UPDATE rft.rollout_group g
SET status = 'claimed', claimed_by = %(worker_id)s, claimed_policy_step = %(policy_step)s, claim_token = claim_token + 1, lease_until = rft.clock() + %(lease_s)s * interval '1 s'
FROM picked p, rft.task t
WHERE g.group_id = p.group_id AND t.task_id = g.task_id
RETURNING g.group_id, g.attempt_id, g.ordinal, g.explore_step, g.group_size, g.claim_token, g.task_id, t.taskset, t.task_key, t.payload,
          g.num_lost < 2 AND EXISTS (SELECT FROM rft.partial_tokens x WHERE x.group_id = g.group_id) AS is_begun;

-- name: plan_by_index
-- For this transaction: find the few rows of each statement by an index, whatever the tables held when the statement was planned.
SELECT set_config('enable_seqscan', 'off', true), set_config('enable_material', 'off', true),
       set_config('enable_hashjoin', 'off', true), set_config('enable_mergejoin', 'off', true);

-- name: allow_hash_joins
-- For the rest of this transaction: join lists of any length with each other, look up tables by key.
SELECT set_config('enable_hashjoin', 'on', true);

-- name: lock_claimed_groups
-- The groups of a write batch that the run still holds under the token with which they were claimed.
SELECT g.group_id, g.group_size
FROM (SELECT * FROM unnest(%(group_ids)s::bigint[], %(claim_tokens)s::bigint[]) AS u (group_id, claim_token) ORDER BY u.group_id) c
CROSS JOIN LATERAL (
    SELECT group_id, group_size FROM rft.rollout_group
    WHERE group_id = c.group_id AND run_id = %(run_id)s AND status = 'claimed' AND claim_token = c.claim_token FOR UPDATE) g;

-- name: group_of_write (read)
-- The run of a group that is not held, and whether the group was purged.
SELECT g.run_id, r.name AS run, g.status = 'abandoned' AND starts_with(g.closed_reason, 'purged: ') AS is_purged
FROM rft.rollout_group g JOIN rft.run r USING (run_id) WHERE g.group_id = %(group_id)s;

-- name: known_policy_versions (read)
-- Those of these policy versions that exist.
SELECT policy_version_id FROM rft.policy_version WHERE policy_version_id = ANY (%(policy_version_ids)s);

-- name: lock_named_tasks
-- The tasks that unplanned groups name, as far as they are stored, and whether they were purged. A purge of them waits until the transaction has
-- ended.
SELECT t.taskset, t.task_key, t.purged
FROM (SELECT DISTINCT * FROM unnest(%(tasksets)s::text[], %(task_keys)s::text[]) AS u (taskset, task_key) ORDER BY 1, 2) g
CROSS JOIN LATERAL (
    SELECT taskset, task_key, payload = '{"purged": true}' AS purged FROM rft.task
    WHERE taskset = g.taskset AND task_key = g.task_key FOR KEY SHARE) t;

-- name: adopt_groups
-- Insert groups without a plan, imported or written by a person, under ids reserved for them, with the tasks they name.
WITH given AS (
    SELECT * FROM unnest(%(group_ids)s::bigint[], %(tasksets)s::text[], %(task_keys)s::text[], %(payloads)s::jsonb[],
                         %(sizes)s::integer[], %(sources)s::text[])
        WITH ORDINALITY AS g (group_id, taskset, task_key, payload, group_size, source, place)),
known AS (
    SELECT t.task_id, t.taskset, t.task_key FROM (SELECT DISTINCT taskset, task_key FROM given) g
    CROSS JOIN LATERAL (
        SELECT task_id, taskset, task_key FROM rft.task WHERE taskset = g.taskset AND task_key = g.task_key OFFSET 0) t),
made AS (
    -- DO UPDATE instead of DO NOTHING, to return a task that another writer is inserting at this moment.
    INSERT INTO rft.task AS t (taskset, task_key, payload)
    SELECT DISTINCT ON (taskset, task_key) taskset, task_key, payload FROM given
    WHERE (taskset, task_key) NOT IN (SELECT taskset, task_key FROM known) ORDER BY taskset, task_key, place
    ON CONFLICT (taskset, task_key) DO UPDATE SET task_key = excluded.task_key RETURNING task_id, taskset, task_key)
INSERT INTO rft.rollout_group (group_id, run_id, attempt_id, ordinal, task_id, explore_step, group_size, source, status, claim_token,
    is_adopted)
SELECT g.group_id, r.run_id, coalesce(r.current_attempt_id, -r.run_id),
       (SELECT coalesce(max(ordinal), -1) FROM rft.rollout_group WHERE run_id = r.run_id) + g.place,
       t.task_id, 0, g.group_size, g.source::rft.experience_source, 'claimed', 1, true
FROM given g JOIN (SELECT * FROM known UNION ALL SELECT * FROM made) t USING (taskset, task_key)
JOIN rft.run r ON r.run_id = %(run_id)s
ORDER BY g.place;

-- name: wait_for_plan_lock
-- Wait for other planners and writers of unplanned groups of the run: each assigns ordinals.
SELECT rft.take_lock('plan', %(run_id)s);

-- name: insert_receipt
-- Insert a batch's receipt. No row if the batch is already stored in the run; waits if another session is storing it at this moment.
INSERT INTO rft.write_receipt (run_id, receipt) VALUES (%(run_id)s, %(receipt)s) ON CONFLICT DO NOTHING;

-- name: reserve_ids
-- Ids for a segment and for the groups, rollouts and experiences of one write.
SELECT nextval('rft.segment_segment_id_seq') AS segment,
       (SELECT coalesce(array_agg(nextval('rft.rollout_group_group_id_seq')), '{}') FROM generate_series(1, %(groups)s)) AS groups,
       (SELECT coalesce(array_agg(nextval('rft.rollout_rollout_id_seq')), '{}') FROM generate_series(1, %(rollouts)s)) AS rollouts,
       (SELECT coalesce(array_agg(nextval('rft.experience_experience_id_seq')), '{}') FROM generate_series(1, %(experiences)s)) AS experiences;

-- name: insert_segment
-- No row if the file is closed: compaction considers its writer dead and may be about to remove it.
WITH file AS (
    INSERT INTO rft.segment_file AS f (uri, size_bytes) VALUES (%(uri)s, %(offset_bytes)s::bigint + %(length_bytes)s::bigint)
    ON CONFLICT (uri) DO UPDATE SET size_bytes = greatest(f.size_bytes, excluded.size_bytes) WHERE f.closed_at IS NULL
    RETURNING file_id)
INSERT INTO rft.segment (segment_id, file_id, offset_bytes, length_bytes, num_rows, checksum)
SELECT %(segment_id)s, file_id, %(offset_bytes)s, %(length_bytes)s, %(num_rows)s, %(checksum)s FROM file;

-- name: insert_baselines
-- Store the greedy rollouts of groups, in the transaction that seals the groups.
INSERT INTO rft.group_baseline (group_id, outcome, reward, reward_parts, response, messages, num_turns, num_response_tokens, finish_reason,
    policy_version_min, seconds, error)
SELECT group_id, outcome, reward, coalesce(reward_parts, '{}'), response, messages, num_turns, num_response_tokens, finish_reason,
       policy_version_min, seconds, error
FROM unnest(%(group_ids)s::bigint[], %(baselines)s::jsonb[]) AS n (group_id, baseline)
CROSS JOIN LATERAL jsonb_to_record(n.baseline) AS b (outcome rft.rollout_outcome, reward float8, reward_parts jsonb, response text,
    messages jsonb, num_turns integer, num_response_tokens integer, finish_reason text, policy_version_min bigint, seconds float8, error text);

-- name: seal_groups
-- Seal groups that have an outcome for every rollout: no facts are added any more, and the pipeline may claim them.
WITH sealed AS (
    UPDATE rft.rollout_group SET status = 'sealed', sealed_at = clock_timestamp(), lease_until = NULL
    WHERE group_id = ANY (%(group_ids)s) RETURNING group_id, run_id, explore_step, ordinal)
INSERT INTO rft.worklist (run_id, consumer, item_kind, item_id, sort_key)
SELECT run_id, 'pipeline', 'group', group_id, explore_step::bigint << 32 | ordinal FROM sealed;

-- name: observe_groups
-- Store the outcomes that selectors learn from, in the transaction that seals the groups. A trigger folds them into task_stat.
INSERT INTO rft.task_observation (run_id, attempt_id, ordinal, task_id, successes, trials)
SELECT g.run_id, g.attempt_id, g.ordinal, g.task_id, o.successes, o.trials
FROM unnest(%(group_ids)s::bigint[], %(successes)s::float8[], %(trials)s::float8[]) AS o (group_id, successes, trials)
CROSS JOIN LATERAL (
    SELECT run_id, attempt_id, ordinal, task_id FROM rft.rollout_group WHERE group_id = o.group_id OFFSET 0) g;

-- name: release_groups_but
-- Release the groups that an explorer does not list as held: all, when it stops; unknown ones, after a claim whose answer was lost.
UPDATE rft.rollout_group SET status = 'planned', claimed_by = NULL, lease_until = NULL, claim_token = claim_token + 1
WHERE claimed_by = %(worker_id)s AND status = 'claimed' AND group_id <> ALL (%(held)s::bigint[]);

-- name: has_succeeded (read)
-- Whether a rollout, or an answer of an evaluation, of a run has succeeded.
SELECT EXISTS (SELECT FROM rft.rollout_group g JOIN rft.rollout o USING (group_id) WHERE g.run_id = %(run_id)s AND o.outcome = 'ok')
       OR EXISTS (SELECT FROM rft.evaluation e JOIN rft.evaluation_answer w USING (evaluation_id)
                  WHERE e.run_id = %(run_id)s AND w.error IS NULL) AS has_succeeded;

-- name: step_outcomes (read)
-- Outcomes of the rollouts of explorer steps, for groups sealed since the run's current attempt began. Steps without such groups are missing.
SELECT g.explore_step, count(DISTINCT g.group_id) AS num_groups, count(*) FILTER (WHERE o.outcome = 'ok') AS num_good,
       count(*) FILTER (WHERE o.outcome IN ('failed', 'timeout')) AS num_failed,
       (array_agg(o.error ORDER BY o.rollout_id) FILTER (WHERE o.outcome IN ('failed', 'timeout')))[1] AS first_error
FROM rft.run r JOIN rft.run_attempt a ON a.attempt_id = r.current_attempt_id
JOIN rft.rollout_group g ON g.run_id = r.run_id AND g.sealed_at >= a.started_at AND g.left_by IS NULL
JOIN rft.rollout o ON o.group_id = g.group_id
WHERE r.run_id = %(run_id)s AND g.explore_step = ANY (%(explore_steps)s)
GROUP BY g.explore_step ORDER BY g.explore_step;
