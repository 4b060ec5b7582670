-- Preferences of several people: compared pairs, rankings and edits side by side, and the pairs that are stored from them.

ALTER TYPE rft.pair_source ADD VALUE 'ranking';
ALTER TYPE rft.pair_source ADD VALUE 'edit';
COMMENT ON TYPE rft.pair_source IS 'human: a person compared the two; rewards: built from the rewards of a group (rft pairs build); ranking, edit: from the rankings or edits of people (rft pairs labels).';

-- A second person may prefer what the first one does. Comparisons of the text, because a value that was just added to a type cannot be used yet.
ALTER TABLE rft.preference_pair DROP CONSTRAINT preference_pair_chosen_id_rejected_id_source_key;
CREATE UNIQUE INDEX preference_pair_human ON rft.preference_pair (chosen_id, rejected_id, author, session_user_name) WHERE source = 'human';
CREATE UNIQUE INDEX preference_pair_built ON rft.preference_pair (chosen_id, rejected_id, source) WHERE source <> 'human';

CREATE FUNCTION rft.ranked(ranking jsonb) RETURNS TABLE (experience_id bigint, place bigint)
LANGUAGE sql IMMUTABLE
AS $$
    SELECT i::bigint, t.place FROM jsonb_array_elements(ranking -> 'order') WITH ORDINALITY AS t (ids, place) CROSS JOIN LATERAL jsonb_array_elements(t.ids) i
$$;
COMMENT ON FUNCTION rft.ranked(jsonb) IS 'Returns the experiences of a ranking with their places from 1; those of a tie have one place.';

CREATE VIEW rft.v_preference WITH (security_invoker = true) AS
SELECT v.*, rft.person(v.author, v.session_user_name, (SELECT rft.shared_accounts())::text[]) AS person
FROM (
    SELECT c.group_id, c.run_id, p.chosen_id AS better_id, p.rejected_id AS worse_id, false AS is_tie, 'pair' AS origin, NULL::text AS kind,
           p.author, p.session_user_name, p.created_at AS made_at
    FROM rft.preference_pair p JOIN rft.experience c ON c.experience_id = p.chosen_id
    WHERE p.source = 'human'
    UNION ALL
    SELECT a.group_id, a.run_id, x.experience_id, y.experience_id, x.place = y.place, 'ranking', a.kind, a.author, a.session_user_name, a.made_at
    FROM rft.v_annotation a CROSS JOIN LATERAL rft.ranked(a.value) x CROSS JOIN LATERAL rft.ranked(a.value) y
    WHERE a.type = 'ranking' AND a.source NOT IN ('judge', 'rule')
      AND (x.place < y.place OR (x.place = y.place AND x.experience_id < y.experience_id))
      AND (a.source = 'adjudication' OR NOT EXISTS (
          SELECT FROM rft.v_annotation j WHERE j.target_id = a.target_id AND j.kind = a.kind AND j.source = 'adjudication'))
    UNION ALL
    SELECT o.group_id, g.run_id, x.experience_id, o.target_id, false, 'edit', o.kind, o.author, o.session_user_name, o.made_at
    FROM rft.edited_response x JOIN rft.annotation o ON o.annotation_id = x.annotation_id JOIN rft.rollout_group g ON g.group_id = o.group_id
    WHERE rft.edit_stands(x.annotation_id)) v;
COMMENT ON VIEW rft.v_preference IS 'What people prefer, a row per compared pair and pair inserted, ranking or edit: pairs that people inserted, rankings that stand, and edits that stand, whose rendering is better than its parent. is_tie: neither is better. group_id, run_id: of the better one; of an edit, of its parent. person: who counts as one person (rft.person). An adjudicated ranking takes the place of all others of its kind.';

-- Of two experiences: rows of one or the other group, since an edit and its parent are in different ones. The groups are found first and in an array,
-- so that each part of the view looks them up by an index: pairs are counted one by one, and a pass over all annotations for each would take hours.
CREATE FUNCTION rft.num_people(chosen bigint, rejected bigint) RETURNS bigint
LANGUAGE sql STABLE
    SET enable_seqscan = off SET enable_material = off SET enable_mergejoin = off SET enable_hashjoin = off SET plan_cache_mode = force_generic_plan
AS $$
    SELECT count(DISTINCT v.person) FROM rft.v_preference v
    WHERE v.group_id = ANY (ARRAY(SELECT e.group_id FROM rft.experience e WHERE e.experience_id IN (chosen, rejected)))
      AND ((v.better_id = chosen AND v.worse_id = rejected) OR (v.better_id = rejected AND v.worse_id = chosen))
$$;
COMMENT ON FUNCTION rft.num_people(bigint, bigint) IS 'Returns how many people have compared two experiences.';

CREATE FUNCTION rft.agreement(chosen bigint, rejected bigint, without_kinds text[] DEFAULT '{}') RETURNS double precision
LANGUAGE sql STABLE
    SET enable_seqscan = off SET enable_material = off SET enable_mergejoin = off SET enable_hashjoin = off SET plan_cache_mode = force_generic_plan
AS $$
    SELECT avg(each.share)::double precision
    FROM (SELECT avg(CASE WHEN v.is_tie THEN 0.5 WHEN v.better_id = chosen THEN 1 ELSE 0 END) AS share FROM rft.v_preference v
          WHERE v.group_id = ANY (ARRAY(SELECT e.group_id FROM rft.experience e WHERE e.experience_id IN (chosen, rejected)))
            AND ((v.better_id = chosen AND v.worse_id = rejected) OR (v.better_id = rejected AND v.worse_id = chosen))
            AND (v.kind IS NULL OR v.kind <> ALL (without_kinds))
          GROUP BY v.person) each
$$;
COMMENT ON FUNCTION rft.agreement(bigint, bigint, text[]) IS 'Returns the share of people who prefer the first of two experiences; a tie counts half, and several comparisons by one person count as their mean. NULL if they were never compared. without_kinds: kinds of labels that do not count.';

-- New columns of a view that is replaced stand at its end.
CREATE OR REPLACE VIEW rft.v_pair AS
SELECT p.pair_id, r.name AS run, c.run_id, c.group_id, t.taskset, t.task_key, p.source, p.author, p.session_user_name, p.chosen_id, p.rejected_id,
       gp.prompt, c.response AS chosen, j.response AS rejected, c.reward AS chosen_reward, j.reward AS rejected_reward,
       CASE p.source::text WHEN 'human' THEN p.margin WHEN 'rewards' THEN c.reward - j.reward END AS margin,
       CASE p.source::text WHEN 'human' THEN true WHEN 'rewards' THEN coalesce(c.reward > j.reward, false)
                           ELSE coalesce(rft.agreement(p.chosen_id, p.rejected_id) > 0.5, false) END
           AND NOT EXISTS (SELECT FROM rft.purged_experience x WHERE x.experience_id IN (p.chosen_id, p.rejected_id)) AS stands,
       c.num_trained_tokens AS chosen_tokens, j.num_trained_tokens AS rejected_tokens,
       c.finish_reason AS chosen_finish_reason, j.finish_reason AS rejected_finish_reason,
       rft.state(g.status, cu.times_sampled, cv.kept, g.trainable) AS chosen_state,
       rft.state(jg.status, ju.times_sampled, jv.kept, jg.trainable) AS rejected_state, p.builder, p.label_cut, p.created_at,
       rft.num_people(p.chosen_id, p.rejected_id) AS num_people, rft.agreement(p.chosen_id, p.rejected_id) AS agreement
FROM rft.preference_pair p
JOIN rft.experience c ON c.experience_id = p.chosen_id
JOIN rft.experience j ON j.experience_id = p.rejected_id
JOIN rft.run r ON r.run_id = c.run_id
JOIN rft.rollout_group g ON g.group_id = c.group_id
JOIN rft.task t USING (task_id)
JOIN rft.rollout_group jg ON jg.group_id = j.group_id
LEFT JOIN rft.verdict cv ON cv.experience_id = c.experience_id AND cv.newest_of = g.decided_by
LEFT JOIN rft.verdict jv ON jv.experience_id = j.experience_id AND jv.newest_of = jg.decided_by
LEFT JOIN rft.draw cu ON cu.newest_of = c.experience_id
LEFT JOIN rft.draw ju ON ju.newest_of = j.experience_id
LEFT JOIN rft.group_prompt gp ON gp.group_id = c.group_id AND gp.prompt_digest = c.prompt_digest;
COMMENT ON VIEW rft.v_pair IS 'Preference pairs with their texts, their current rewards, and how each answer ended and what became of it. margin: the current difference of the rewards for a pair built from rewards; the person''s value, or NULL, for a person''s pair. num_people, agreement: how many people compared the two, and the share of them who prefer the chosen one. stands: false if a correction removed the difference of rewards, if a pair from rankings or edits is no longer preferred by most, or if one of the two was purged.';

-- Of the rows of one direction, the first that stands, people's before that of the rewards. Both directions cannot have more than half of the people.
CREATE VIEW rft.v_preferred_pair AS
SELECT p.* FROM rft.v_pair p
WHERE p.stands AND coalesce(p.agreement > 0.5, true)
  AND NOT EXISTS (
      SELECT FROM rft.preference_pair o
      WHERE o.chosen_id = p.chosen_id AND o.rejected_id = p.rejected_id AND (o.source::text = 'rewards', o.pair_id) < (p.source::text = 'rewards', p.pair_id)
        AND CASE o.source::text WHEN 'rewards' THEN coalesce(p.chosen_reward > p.rejected_reward, false) ELSE coalesce(p.agreement > 0.5, false) END);
COMMENT ON VIEW rft.v_preferred_pair IS 'Preference pairs to train on: of the rows of rft.v_pair that stand, one for each two answers. If people compared them, the direction that more than half prefer, and none at an even share; otherwise that of the rewards. num_people, agreement: how many people compared the two, and the share of them who prefer the chosen one.';
