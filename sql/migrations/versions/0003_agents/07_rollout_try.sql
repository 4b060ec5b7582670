-- Tries of a rollout that failed for reasons outside of it.

ALTER TABLE rft.rollout ADD COLUMN tries jsonb CHECK (jsonb_typeof(tries) = 'array');
COMMENT ON COLUMN rft.rollout.tries IS 'The tries that were given up, the first first, each with error (a failure of the infrastructure, or the loss of an explorer whose answers could not all be taken over) and chats (what it had sampled, as in evaluation_answer.chats, which is never trained on). NULL if it is the first try. rft.v_rollout_try has a row for each.';

CREATE VIEW rft.v_rollout_try AS
SELECT o.rollout_id, r.name AS run, g.run_id, g.group_id, o.rollout_index, n.place::integer AS try, n.tried ->> 'error' AS error,
       (SELECT count(*) FROM jsonb_path_query(n.tried, '$.chats[*].turns[*]'))::integer AS num_turns,
       (SELECT coalesce(sum(t::bigint), 0) FROM jsonb_path_query(n.tried, '$.chats[*].turns[*].num_tokens ? (@ >= 0 && @ <= 2147483647)') t)::bigint AS num_tokens,
       n.tried -> 'chats' -> -1 -> 'messages' AS messages, n.tried -> 'chats' AS chats
FROM rft.rollout o
JOIN rft.rollout_group g USING (group_id)
JOIN rft.run r USING (run_id)
CROSS JOIN LATERAL jsonb_array_elements(o.tries) WITH ORDINALITY AS n (tried, place)
WHERE o.tries IS NOT NULL;
COMMENT ON VIEW rft.v_rollout_try IS 'The tries of rollouts that were given up, from 1, with what they had sampled: numbers of turns and of their tokens, the messages of the last branch, and all chats.';

-- Results may quote any text of their group, and a question its experience.
CREATE OR REPLACE FUNCTION rft.purge_outcomes(groups bigint[], of_purge bigint) RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
    -- The greedy rollout answers the same prompt.
    UPDATE rft.group_baseline
    SET response = '[purged]', messages = NULL, error = CASE WHEN error IS NOT NULL THEN '[purged]' END, reward_parts = rft.numbers_of(reward_parts)
    WHERE group_id = ANY (groups);
    -- The error of a rollout stays only with a turn that is not purged, its earlier tries only if nothing of it is purged: they may have begun
    -- as any branch of it.
    UPDATE rft.rollout o
    SET error = CASE WHEN o.error IS NOT NULL AND p.kept = 0 THEN '[purged]' ELSE o.error END,
        tries = CASE WHEN o.tries IS NOT NULL AND (p.purged > 0 OR p.kept = 0) THEN '[{"error": "[purged]", "chats": []}]' ELSE o.tries END
    FROM rft.rollout c
    CROSS JOIN LATERAL (
        SELECT count(*) FILTER (WHERE x.experience_id IS NULL) AS kept, count(x.experience_id) AS purged
        FROM (SELECT experience_id FROM rft.experience WHERE group_id = c.group_id AND rollout_id = c.rollout_id OFFSET 0) e
        LEFT JOIN rft.purged_experience x USING (experience_id)) p
    WHERE c.group_id = ANY (groups) AND (c.error IS NOT NULL OR c.tries IS NOT NULL) AND o.rollout_id = c.rollout_id AND (p.kept = 0 OR p.purged > 0);
    DELETE FROM rft.partial_tokens WHERE group_id = ANY (groups);

    DELETE FROM rft.worklist w USING rft.rollout_group g
    WHERE g.group_id = ANY (groups) AND w.item_kind = 'group' AND w.item_id = g.group_id AND w.run_id = g.run_id AND w.consumer = 'pipeline';
    UPDATE rft.worklist w SET available = false, resume_step = NULL FROM rft.rollout_group g
    WHERE g.group_id = ANY (groups) AND w.item_kind = 'group' AND w.item_id = g.group_id AND w.run_id = g.run_id AND w.consumer = 'trainer';
    UPDATE rft.rollout_group SET status = 'abandoned', trainable = false, aged_out = false, lease_until = NULL,
        closed_reason = (SELECT 'purged: ' || reason FROM rft.purge WHERE purge_id = of_purge)
    WHERE group_id = ANY (groups);

    -- Open questions are no longer shown, since the group is abandoned.
    UPDATE rft.verdict SET reason = '[purged]' WHERE group_id = ANY (groups) AND reason IS NOT NULL;
    UPDATE rft.score s SET error = CASE WHEN s.error IS NOT NULL THEN '[purged]' END, scores = rft.numbers_of(s.scores)
    FROM rft.experience e WHERE e.group_id = ANY (groups) AND s.experience_id = e.experience_id;
    UPDATE rft.review v SET question = '[purged]'
    WHERE v.group_id = ANY (groups) AND EXISTS (SELECT FROM rft.purged_experience x WHERE x.experience_id = v.experience_id);
END
$$;
