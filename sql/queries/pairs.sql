-- name: finished_groups (read)
-- Groups of a run that receive no more facts, one page at a time.
SELECT group_id FROM rft.rollout_group
WHERE run_id = %(run_id)s AND group_id > %(after_id)s AND status IN ('sealed', 'ready') ORDER BY group_id LIMIT %(limit)s;

-- name: dropped_of_groups (read)
-- The experiences of groups that the chain of their run dropped.
SELECT experience_id, stage, reason FROM rft.v_left_out WHERE group_id = ANY (%(group_ids)s);

-- name: dropped_of_pairs (read)
-- The experiences of pairs that the chains of their runs dropped.
SELECT m.experience_id, l.stage, l.reason FROM (
    SELECT DISTINCT s.experience_id FROM rft.preference_pair p
    CROSS JOIN LATERAL (VALUES (p.chosen_id), (p.rejected_id)) AS s (experience_id) WHERE p.pair_id = ANY (%(pair_ids)s)) m
CROSS JOIN LATERAL (SELECT stage, reason FROM rft.v_left_out WHERE experience_id = m.experience_id OFFSET 0) l;

-- name: new_pairs (read)
-- The built pairs that are not stored yet.
SELECT n.chosen_id, n.rejected_id
FROM unnest(%(chosen_ids)s::bigint[], %(rejected_ids)s::bigint[]) AS n (chosen_id, rejected_id)
WHERE NOT EXISTS (
    SELECT FROM rft.preference_pair p
    WHERE p.chosen_id = n.chosen_id AND p.rejected_id = n.rejected_id AND p.source = %(source)s::rft.pair_source);

-- name: insert_pairs
-- Store pairs. A stored pair stays as it is, so building twice adds nothing.
INSERT INTO rft.preference_pair (chosen_id, rejected_id, source, author, builder, label_cut)
SELECT n.chosen_id, n.rejected_id, %(source)s::rft.pair_source, %(author)s, %(builder)s, %(label_cut)s
FROM unnest(%(chosen_ids)s::bigint[], %(rejected_ids)s::bigint[]) AS n (chosen_id, rejected_id)
ON CONFLICT DO NOTHING;

-- name: pairs_that_stand (read)
-- The pairs of a run that people prefer or its rewards still support, each once, with their texts.
SELECT pair_id, taskset, task_key, prompt, chosen, rejected, chosen_reward, rejected_reward, margin, chosen_tokens, rejected_tokens,
       source::text AS source, author, chosen_id, rejected_id, label_cut
FROM rft.v_preferred_pair WHERE run_id = %(run_id)s ORDER BY pair_id;

-- name: preferred_pairs (read)
-- The pairs of a run that people's rankings and edits compare, with the share of people who prefer the chosen one; at an even share the chosen one is
-- arbitrary. Without those of the given kinds, which do not count for the shares either.
WITH compared AS MATERIALIZED (
    SELECT v.group_id, least(v.better_id, v.worse_id) AS one_id, greatest(v.better_id, v.worse_id) AS other_id, min(v.origin) AS origin
    FROM rft.v_preference v WHERE v.run_id = %(run_id)s AND v.origin IN ('edit', 'ranking') AND v.kind <> ALL (%(without_kinds)s::text[])
    GROUP BY 1, 2, 3),
shares AS MATERIALIZED (SELECT c.*, rft.agreement(c.one_id, c.other_id, %(without_kinds)s::text[]) AS share FROM compared c)
SELECT s.group_id, c.experience_id AS chosen_id, j.experience_id AS rejected_id, s.origin AS source, greatest(s.share, 1 - s.share) AS agreement,
       c.num_trained_tokens AS chosen_tokens, j.num_trained_tokens AS rejected_tokens,
       rft.same_prompt(c.group_id, c.prompt_digest, j.group_id, j.prompt_digest) AS same_prompt
FROM shares s
CROSS JOIN LATERAL (SELECT e.* FROM rft.experience e WHERE e.experience_id = CASE WHEN s.share >= 0.5 THEN s.one_id ELSE s.other_id END OFFSET 0) c
CROSS JOIN LATERAL (SELECT e.* FROM rft.experience e WHERE e.experience_id = CASE WHEN s.share >= 0.5 THEN s.other_id ELSE s.one_id END OFFSET 0) j
WHERE NOT EXISTS (SELECT FROM rft.purged_experience x WHERE x.experience_id IN (s.one_id, s.other_id))
ORDER BY s.group_id, c.experience_id, j.experience_id;

-- name: blind_kinds (read)
-- The kinds that are blind.
SELECT unnest(rft.blind_kinds()) AS kind;

-- name: pairs_of_kinds (read)
-- How many pairs of a run the rankings and edits of kinds compare.
SELECT count(DISTINCT (least(better_id, worse_id), greatest(better_id, worse_id))) AS num
FROM rft.v_preference WHERE run_id = %(run_id)s AND origin IN ('edit', 'ranking') AND kind = ANY (%(kinds)s::text[]);

-- name: left_out_among (read)
-- Those of these experiences that chains dropped.
SELECT l.experience_id, l.stage, l.reason FROM unnest(%(experience_ids)s::bigint[]) AS m (experience_id)
CROSS JOIN LATERAL (SELECT experience_id, stage, reason FROM rft.v_left_out WHERE experience_id = m.experience_id OFFSET 0) l;
