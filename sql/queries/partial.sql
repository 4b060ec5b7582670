-- name: keep_partial_tokens
-- Store a part of an answer while the run's group is claimed under this token and the run has not finished. If the confirmation of an earlier try was
-- lost, the part may have grown. The run is locked first, as everywhere, so that it does not finish before this commits.
INSERT INTO rft.partial_tokens (group_id, rollout_index, generation_index, claim_token, first_token, input_digest, token_ids, logprobs,
    version_starts, policy_version_ids, finish_reason)
SELECT g.group_id, %(rollout_index)s, %(generation_index)s, g.claim_token, %(first_token)s, %(input_digest)s, %(token_ids)s, %(logprobs)s,
       %(version_starts)s, %(policy_version_ids)s, %(finish_reason)s
FROM (SELECT c.group_id, c.claim_token FROM rft.run r JOIN rft.rollout_group c ON c.run_id = r.run_id
      WHERE c.group_id = %(group_id)s AND r.run_id = %(run_id)s AND c.claim_token = %(claim_token)s AND c.status = 'claimed' AND r.status <> 'finished' FOR SHARE) g
ON CONFLICT (group_id, rollout_index, generation_index, claim_token, first_token) DO UPDATE
SET token_ids = excluded.token_ids, logprobs = excluded.logprobs, version_starts = excluded.version_starts,
    policy_version_ids = excluded.policy_version_ids, finish_reason = excluded.finish_reason;

-- name: partial_tokens (read)
-- The parts of answers for groups, in the order in which they were sampled, with the trainer step of the oldest policy of each, and
-- the newest step for which the run has drawn: none of them is in its batch.
SELECT t.group_id, t.rollout_index, t.generation_index, t.first_token, t.input_digest, t.token_ids, t.logprobs, t.version_starts,
       t.policy_version_ids, t.finish_reason,
       (SELECT min(p.trainer_step) FROM rft.policy_version p WHERE p.policy_version_id = ANY (t.policy_version_ids)) AS oldest_step,
       (SELECT coalesce(max(d.trainer_step), 0) FROM rft.draw d JOIN rft.run r ON r.current_attempt_id = d.attempt_id
        WHERE r.run_id = %(run_id)s) AS drawn_step
FROM unnest(%(group_ids)s::bigint[]) AS c (group_id)
CROSS JOIN LATERAL (SELECT * FROM rft.partial_tokens WHERE group_id = c.group_id OFFSET 0) t
ORDER BY t.group_id, t.rollout_index, t.generation_index, t.claim_token, t.first_token;

-- name: claims_continue
-- Record that claimed groups have tokens of older policies.
UPDATE rft.rollout_group g SET claimed_policy_step = least(g.claimed_policy_step, c.policy_step)
FROM unnest(%(group_ids)s::bigint[], %(policy_steps)s::integer[]) AS c (group_id, policy_step)
WHERE g.group_id = c.group_id AND g.status = 'claimed' AND g.claimed_by = %(worker_id)s;

-- name: forget_partial_tokens
-- Delete the parts of answers for groups that are complete.
DELETE FROM rft.partial_tokens p USING unnest(%(group_ids)s::bigint[]) AS c (group_id) WHERE p.group_id = c.group_id;

-- name: forget_unfinished
-- Delete the parts of answers of a run that has finished.
DELETE FROM rft.partial_tokens p USING rft.rollout_group g
WHERE g.run_id = %(run_id)s AND g.status IN ('planned', 'claimed') AND p.group_id = g.group_id;
