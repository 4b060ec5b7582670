-- Tries of a rollout that failed for reasons outside of it.

ALTER TABLE rft.rollout ADD COLUMN try_errors text[];
COMMENT ON COLUMN rft.rollout.try_errors IS 'Why earlier tries of the rollout were given up, the first first: errors of the infrastructure, or the loss of an explorer whose answers could not all be taken over. NULL if it is the first try.';

-- Results may quote any text of their group, and a question its experience.
CREATE OR REPLACE FUNCTION rft.purge_outcomes(groups bigint[], of_purge bigint) RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
    -- The greedy rollout answers the same prompt.
    UPDATE rft.group_baseline
    SET response = '[purged]', messages = NULL, error = CASE WHEN error IS NOT NULL THEN '[purged]' END, reward_parts = rft.numbers_of(reward_parts)
    WHERE group_id = ANY (groups);
    -- The errors of a rollout stay only with a turn that is not purged.
    UPDATE rft.rollout o
    SET error = CASE WHEN o.error IS NOT NULL THEN '[purged]' END, try_errors = CASE WHEN o.try_errors IS NOT NULL THEN ARRAY['[purged]'] END
    WHERE o.group_id = ANY (groups) AND (o.error IS NOT NULL OR o.try_errors IS NOT NULL) AND NOT EXISTS (
        SELECT FROM rft.experience e WHERE e.group_id = o.group_id AND e.rollout_id = o.rollout_id
            AND NOT EXISTS (SELECT FROM rft.purged_experience x WHERE x.experience_id = e.experience_id));
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
