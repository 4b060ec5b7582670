-- Draws that a new attempt undoes because they came after its checkpoint.

-- Folds every draw of a history: whole tables, with hash joins wherever possible.
CREATE FUNCTION rft.return_draws(of_run bigint, of_attempt bigint) RETURNS void
LANGUAGE plpgsql SET enable_nestloop = off SET enable_mergejoin = off
AS $$
DECLARE
    parent bigint;
    start_step integer;
    items bigint[];
    priorities double precision[];
    times integer[];
    placed record;
BEGIN
    SELECT a.parent_attempt_id, coalesce(c.trainer_step, 0) INTO parent, start_step
    FROM rft.run_attempt a LEFT JOIN rft.checkpoint c ON c.checkpoint_id = a.from_checkpoint_id WHERE a.attempt_id = of_attempt;
    -- Groups are locked first, as labels lock them. A concurrent label is then either visible to the statements that follow, or sees the
    -- result of this one.
    WITH used AS (
        SELECT w.item_id, w.available, w.times_sampled, w.resume_step, g.status = 'ready' AND g.trainable AS decided, g.source, k.taskset,
               u.times::integer AS times, u.last_step, u.undone_key
        FROM rft.worklist w
        JOIN rft.rollout_group g ON g.group_id = w.item_id
        JOIN rft.task k USING (task_id)
        CROSS JOIN LATERAL (
            SELECT count(DISTINCT (d.attempt_id, d.trainer_step)) FILTER (WHERE h.history_id IS NOT NULL) AS times,
                   max(d.trainer_step) FILTER (WHERE h.history_id IS NOT NULL) AS last_step,
                   (array_agg(d.draw_key ORDER BY d.draw_id) FILTER (WHERE h.history_id IS NULL AND p.history_id IS NOT NULL))[1] AS undone_key
            FROM rft.draw d
            LEFT JOIN rft.attempt_history h ON h.history_id = of_attempt AND h.attempt_id = d.attempt_id
                AND (h.last_step IS NULL OR d.trainer_step <= h.last_step)
            LEFT JOIN rft.attempt_history p ON p.history_id = parent AND p.attempt_id = d.attempt_id
                AND (p.last_step IS NULL OR d.trainer_step <= p.last_step)
            WHERE d.item_kind = 'group' AND d.item_id = w.item_id) u
        WHERE w.run_id = of_run AND w.consumer = 'trainer' AND w.item_kind = 'group' AND (NOT w.available OR w.times_sampled > 0)),
    due AS (
        SELECT u.*, n.lane AS lane_now,
               CASE WHEN NOT m.may THEN NULL WHEN u.times > 0 AND u.last_step + n.cooldown_steps > start_step
                    THEN u.last_step + n.cooldown_steps END AS resume_now,
               u.decided AND m.may AND (u.times = 0 OR u.last_step + n.cooldown_steps <= start_step) AS available_now
        FROM used u
        LEFT JOIN LATERAL rft.lane_of(of_run, u.source, u.taskset, u.times) n ON true
        CROSS JOIN LATERAL (SELECT u.times = 0 OR (n.lane IS NOT NULL AND (n.max_times_sampled IS NULL OR u.times < n.max_times_sampled)) AS may) m),
    locked AS (
        SELECT g.group_id FROM rft.rollout_group g JOIN due ON due.item_id = g.group_id
        WHERE (due.times, due.available_now, due.resume_now) IS DISTINCT FROM (due.times_sampled, due.available, due.resume_step)
        ORDER BY g.group_id FOR UPDATE OF g),
    returned AS (
        UPDATE rft.worklist w
        SET available = d.available_now, times_sampled = d.times, resume_step = d.resume_now, lane = coalesce(d.lane_now, ''),
            draw_key = coalesce(d.undone_key, w.draw_key)
        FROM due d JOIN locked l ON l.group_id = d.item_id
        WHERE w.run_id = of_run AND w.consumer = 'trainer' AND w.item_kind = 'group' AND w.item_id = d.item_id
        RETURNING w.item_id, w.priority, w.times_sampled)
    SELECT array_agg(item_id), array_agg(priority), array_agg(times_sampled) INTO items, priorities, times FROM returned;
    PERFORM rft.correct_uses(of_run);
    -- The weight is that of the lane to which it returned.
    IF items IS NOT NULL THEN
        FOR placed IN SELECT * FROM rft.place_items(of_run, items, rft.formula_values(of_run, items, priorities, times), times) LOOP
            UPDATE rft.worklist SET draw_weight = placed.draw_weight
            WHERE run_id = of_run AND consumer = 'trainer' AND item_kind = 'group' AND item_id = placed.item_id AND draw_weight IS DISTINCT FROM placed.draw_weight;
        END LOOP;
    END IF;
END
$$;
COMMENT ON FUNCTION rft.return_draws IS 'Restores which groups are drawn, rest or can be drawn from the draws of a new attempt''s history; draws after its checkpoint are undone.';
