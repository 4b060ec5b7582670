-- name: lock_labels
-- Wait for transactions that have labelled and not committed. While the lock is held, no label can get an id.
SELECT rft.lock_labels();

-- name: label_cut (read)
-- The newest label or annotation. With lock_labels held, this snapshot sees exactly those up to it.
SELECT greatest((SELECT max(label_id) FROM rft.label), (SELECT max(annotation_id) FROM rft.annotation), 0) AS label_cut;

-- name: selected_experiences
-- The identifying content of the selected experiences, in id order. line: the input of the selection's hash, with rewards of turns where they were
-- corrected. problem: why an experience cannot be used.
SELECT i.item_id,
       concat_ws(' ', e.experience_id, coalesce(s.first_checksum, s.checksum), e.segment_row,
                 CASE WHEN x.experience_id IS NOT NULL THEN 'purged' END,
                 CASE WHEN %(label_cut)s::bigint IS NOT NULL THEN coalesce(rft.reward_at(e.experience_id, %(label_cut)s)::text, 'none') END,
                 CASE WHEN %(label_cut)s::bigint IS NOT NULL THEN rft.turn_rewards_at(e.experience_id, %(label_cut)s)::text END) AS line,
       CASE WHEN e.experience_id IS NULL THEN 'does not exist'
            WHEN x.experience_id IS NOT NULL THEN 'was purged'
            WHEN s.segment_id IS NULL THEN rft.why_no_arrays(e.segment_id) END AS problem
FROM unnest(%(item_ids)s::bigint[]) AS i (item_id)
LEFT JOIN rft.experience e ON e.experience_id = i.item_id
LEFT JOIN rft.segment s USING (segment_id)
LEFT JOIN rft.purged_experience x USING (experience_id)
ORDER BY i.item_id;

-- name: selected_pairs
-- The identifying content of the selected preference pairs; line and problem as in selected_experiences.
SELECT i.item_id,
       concat_ws(' ', p.pair_id, c.experience_id, coalesce(sc.first_checksum, sc.checksum), c.segment_row, j.experience_id,
                 coalesce(sj.first_checksum, sj.checksum), j.segment_row,
                 CASE WHEN xc.experience_id IS NOT NULL OR xj.experience_id IS NOT NULL THEN 'purged' END,
                 CASE WHEN %(label_cut)s::bigint IS NOT NULL THEN
                     coalesce(rft.reward_at(c.experience_id, %(label_cut)s)::text, 'none') || ' '
                     || coalesce(rft.reward_at(j.experience_id, %(label_cut)s)::text, 'none') END,
                 CASE WHEN %(label_cut)s::bigint IS NOT NULL THEN 'turns ' || rft.turn_rewards_at(c.experience_id, %(label_cut)s)::text END,
                 CASE WHEN %(label_cut)s::bigint IS NOT NULL THEN 'and ' || rft.turn_rewards_at(j.experience_id, %(label_cut)s)::text END) AS line,
       CASE WHEN p.pair_id IS NULL THEN 'does not exist'
            WHEN xc.experience_id IS NOT NULL OR xj.experience_id IS NOT NULL THEN
                format('names experience %%s, which was purged', coalesce(xc.experience_id, xj.experience_id))
            WHEN sc.segment_id IS NULL OR sj.segment_id IS NULL
                THEN rft.why_no_arrays(CASE WHEN sc.segment_id IS NULL THEN c.segment_id ELSE j.segment_id END)
            WHEN NOT rft.same_prompt(c.group_id, c.prompt_digest, j.group_id, j.prompt_digest)
                THEN format('compares answers to different prompts (experiences %%s and %%s)', p.chosen_id, p.rejected_id)
       END AS problem
FROM unnest(%(item_ids)s::bigint[]) AS i (item_id)
LEFT JOIN rft.preference_pair p ON p.pair_id = i.item_id
LEFT JOIN rft.experience c ON c.experience_id = p.chosen_id
LEFT JOIN rft.experience j ON j.experience_id = p.rejected_id
LEFT JOIN rft.segment sc ON sc.segment_id = c.segment_id
LEFT JOIN rft.segment sj ON sj.segment_id = j.segment_id
LEFT JOIN rft.purged_experience xc ON xc.experience_id = c.experience_id
LEFT JOIN rft.purged_experience xj ON xj.experience_id = j.experience_id
ORDER BY i.item_id;

-- name: selected_groups
-- The identifying content of the selected groups; line and problem as in selected_experiences. A line names every experience that is not left out.
SELECT i.item_id,
       concat_ws(' ', i.item_id, string_agg(
           concat_ws(' ', e.experience_id, coalesce(s.first_checksum, s.checksum), e.segment_row,
                     CASE WHEN x.experience_id IS NOT NULL THEN 'purged' END,
                     CASE WHEN %(label_cut)s::bigint IS NOT NULL THEN
                         coalesce(rft.reward_at(e.experience_id, %(label_cut)s)::text, 'none') END,
                     CASE WHEN %(label_cut)s::bigint IS NOT NULL THEN rft.turn_rewards_at(e.experience_id, %(label_cut)s)::text END),
                     ' ' ORDER BY e.experience_id)) AS line,
       CASE WHEN count(g.group_id) = 0 THEN 'does not exist'
            WHEN count(e.experience_id) = 0 THEN 'has no experiences'
            WHEN count(x.experience_id) > 0 THEN format('contains experience %%s, which was purged', min(x.experience_id))
            WHEN count(*) > count(s.segment_id) THEN rft.why_no_arrays(min(e.segment_id) FILTER (WHERE s.segment_id IS NULL)) END AS problem
FROM unnest(%(item_ids)s::bigint[]) AS i (item_id)
LEFT JOIN rft.rollout_group g ON g.group_id = i.item_id
LEFT JOIN rft.experience e ON e.group_id = i.item_id
    AND NOT EXISTS (SELECT FROM unnest(%(left_out)s::bigint[]) AS l (experience_id) WHERE l.experience_id = e.experience_id)
LEFT JOIN rft.segment s USING (segment_id)
LEFT JOIN rft.purged_experience x USING (experience_id)
GROUP BY i.item_id ORDER BY i.item_id;

-- name: experiences_of_items
-- The experiences of selected items, with the rewards to train with.
SELECT m.experience_id, rft.reward_at(m.experience_id, %(label_cut)s::bigint) AS reward
FROM unnest(%(item_ids)s::bigint[]) AS i (item_id)
CROSS JOIN LATERAL rft.selected_experiences(%(kind)s::rft.item_kind, i.item_id) m
WHERE NOT EXISTS (SELECT FROM unnest(%(left_out)s::bigint[]) AS l (experience_id) WHERE l.experience_id = m.experience_id)
ORDER BY m.experience_id;

-- name: dropped_of_items (read)
-- Items with experiences that the chain of their run dropped: those experiences with their stages and reasons, and how many rollouts keep an experience.
SELECT i.item_id, count(DISTINCT e.rollout_id) FILTER (WHERE d.stage IS NULL) AS num_rollouts,
       array_agg(e.experience_id ORDER BY m.place) FILTER (WHERE d.stage IS NOT NULL) AS experience_ids,
       array_agg(d.stage ORDER BY m.place) FILTER (WHERE d.stage IS NOT NULL) AS stages,
       array_agg(d.reason ORDER BY m.place) FILTER (WHERE d.stage IS NOT NULL) AS reasons
FROM unnest(%(item_ids)s::bigint[]) AS i (item_id)
CROSS JOIN LATERAL rft.selected_experiences(%(kind)s::rft.item_kind, i.item_id) m
JOIN rft.experience e ON e.experience_id = m.experience_id
LEFT JOIN LATERAL (SELECT stage, reason FROM rft.v_left_out WHERE experience_id = e.experience_id OFFSET 0) d ON true
GROUP BY i.item_id HAVING count(d.stage) > 0 ORDER BY i.item_id;

-- name: weights_of_priorities
-- The weights of priorities, as prioritised sampling computes them.
SELECT array_agg(rft.draw_weight('prioritized', p.priority, %(exponent)s) ORDER BY p.place) AS weights
FROM unnest(%(priorities)s::double precision[]) WITH ORDINALITY AS p (priority, place);

-- name: small_groups (read)
-- Groups with experiences of fewer rollouts than a number, without those that are left out.
SELECT i.item_id, count(DISTINCT e.rollout_id) AS num_rollouts
FROM unnest(%(item_ids)s::bigint[]) AS i (item_id) LEFT JOIN rft.experience e ON e.group_id = i.item_id
    AND NOT EXISTS (SELECT FROM unnest(%(left_out)s::bigint[]) AS l (experience_id) WHERE l.experience_id = e.experience_id)
GROUP BY i.item_id HAVING count(DISTINCT e.rollout_id) < %(num_rollouts)s ORDER BY i.item_id;

-- name: store_selection
-- Store the selection that a run trains on.
UPDATE rft.run SET source_sql = %(sql)s, source_kind = %(kind)s, source_rows = %(num_rows)s, source_hash = %(content_hash)s,
    source_epochs = %(epochs)s, source_weighted = %(weighted)s, label_cut = %(label_cut)s
WHERE run_id = %(run_id)s RETURNING *;

-- name: queue_selection
-- Fill the run's queue: one row per item, at the time of its first draw. Policy age does not count.
INSERT INTO rft.worklist (run_id, consumer, item_kind, item_id, sort_key, policy_step, draw_weight, draw_key)
SELECT r.run_id, 'selection', r.source_kind, i.item_id, 0, 2147483647, i.weight, rft.selection_time(r.seed, 0, i.item_id, i.weight)
FROM rft.run r, unnest(%(item_ids)s::bigint[], %(weights)s::double precision[]) AS i (item_id, weight) WHERE r.run_id = %(run_id)s;

-- name: queue_left_out
-- Record the experiences of selected groups that are not drawn with them.
INSERT INTO rft.worklist (run_id, consumer, item_kind, item_id, sort_key, policy_step, lane, available)
SELECT %(run_id)s, 'selection', 'experience', l.experience_id, 0, 2147483647, 'left out', false
FROM unnest(%(experience_ids)s::bigint[]) AS l (experience_id);

-- name: queued_left_out (read)
-- The experiences that are not drawn with the selected groups of a run.
SELECT e.group_id, e.experience_id FROM rft.worklist w JOIN rft.experience e ON e.experience_id = w.item_id
WHERE w.run_id = %(run_id)s::bigint AND w.consumer = 'selection' AND w.item_kind = 'experience' AND w.lane = 'left out' ORDER BY e.experience_id;

-- name: analyze_worklist
-- Analyze the queue. A queue of a million rows that the planner believes empty would be sorted at every draw.
SELECT rft.analyze_worklist();

-- name: queued_selection (read)
-- The items of a stored selection, with their weights.
SELECT item_id, draw_weight FROM rft.worklist
WHERE run_id = %(run_id)s AND consumer = 'selection' AND item_kind = %(kind)s::rft.item_kind AND lane = '' ORDER BY item_id;

-- name: restore_selection
-- Set a stored selection to where the history of an attempt left it.
SELECT rft.restore_selection(%(run_id)s, %(attempt_id)s);

-- name: draw_selected
-- Draw from a stored selection for a trainer step; return the outcome.
SELECT * FROM rft.draw_selected(%(run_id)s, %(attempt_id)s, %(step)s, %(wanted)s);

-- name: release_selected
-- Release a batch that was not used: its draws never took place.
WITH batch AS (DELETE FROM rft.batch WHERE attempt_id = %(attempt_id)s AND trainer_step = %(step)s)
DELETE FROM rft.draw WHERE attempt_id = %(attempt_id)s AND trainer_step = %(step)s;

-- name: drawn_selected_state
-- Compare a step's draws with what a draw of the same rows would record now. outcome: same, changed (by a label, unless labels are pinned, or
-- a purge) or fenced (the attempt no longer holds the run).
SELECT CASE
    WHEN r.current_attempt_id IS DISTINCT FROM %(attempt_id)s THEN 'fenced'
    WHEN EXISTS (
        SELECT FROM rft.draw d
        WHERE d.attempt_id = %(attempt_id)s AND d.trainer_step = %(step)s
          AND (d.reward_used IS DISTINCT FROM rft.reward_at(d.experience_id, r.label_cut)
               OR d.turn_rewards_used IS DISTINCT FROM rft.turn_rewards_at(d.experience_id, r.label_cut)
               OR EXISTS (SELECT FROM rft.purged_experience x WHERE x.experience_id = d.experience_id)))
        THEN 'changed'
    ELSE 'same' END AS outcome
FROM rft.run r WHERE r.run_id = %(run_id)s;
