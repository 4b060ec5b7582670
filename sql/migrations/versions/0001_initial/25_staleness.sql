-- Staleness: the groups that are too old for a step, and those for which a step is the last.

CREATE FUNCTION rft.age_out(of_run bigint, step integer, staleness_limit integer) RETURNS void
LANGUAGE plpgsql SET enable_seqscan = off SET enable_material = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    old record;
    aged boolean := false;
BEGIN
    -- The minimum is a single index lookup.
    IF coalesce((SELECT min(policy_step) FROM rft.worklist WHERE run_id = of_run AND consumer = 'trainer' AND available), 2147483647) >= step - 1 - staleness_limit THEN
        RETURN;
    END IF;
    -- A group that was drawn before leaves the worklist without a replacement.
    FOR old IN
        SELECT w.item_id FROM rft.worklist w
        WHERE w.run_id = of_run AND w.consumer = 'trainer' AND w.item_kind = 'group' AND w.available AND w.policy_step < step - 1 - staleness_limit ORDER BY w.item_id
    LOOP
        PERFORM FROM rft.rollout_group WHERE group_id = old.item_id FOR UPDATE SKIP LOCKED;
        CONTINUE WHEN NOT FOUND;
        UPDATE rft.worklist SET available = false
        WHERE run_id = of_run AND consumer = 'trainer' AND item_kind = 'group' AND item_id = old.item_id AND available
        RETURNING item_id, policy_step, times_sampled INTO old;
        IF FOUND AND old.times_sampled = 0 THEN
            UPDATE rft.rollout_group
            SET trainable = false, aged_out = true, closed_reason = format(
                'aged out: staleness %s at step %s, max_staleness %s', step - 1 - old.policy_step, step, staleness_limit)
            WHERE group_id = old.item_id;
            aged := true;
        END IF;
    END LOOP;
    IF aged THEN
        PERFORM pg_notify('rft_ready', '');
    END IF;
END
$$;
COMMENT ON FUNCTION rft.age_out IS 'Removes groups too old for a step from the worklist; the planner replaces those that were never drawn.';

-- A batch that is full without them may be drawn before the slowest groups are ready. Those that would be too old for the next step are
-- waited for, so that they are not sampled in vain; not those that wait for people, which may take days.
CREATE FUNCTION rft.is_last_chance(of_run bigint, step integer, oldest integer) RETURNS boolean
LANGUAGE sql STABLE
AS $$
    SELECT EXISTS (
        SELECT FROM rft.rollout_group g
        WHERE g.run_id = of_run AND g.status IN ('claimed', 'sealed') AND g.explore_step < step AND g.trainable AND g.left_by IS NULL
          AND g.claimed_policy_step = oldest
          AND NOT EXISTS (
              SELECT FROM rft.worklist w
              WHERE w.run_id = of_run AND w.consumer = 'pipeline' AND w.item_kind = 'group' AND w.item_id = g.group_id AND NOT w.available
                AND w.claimed_by IS NULL AND w.lease_until > rft.clock()))
$$;
COMMENT ON FUNCTION rft.is_last_chance IS 'Returns whether groups are still sampled or decided on that this step is the last to take, because their policy (claimed_policy_step) is the oldest that it accepts.';
