-- The cooldown between two draws of a group. These functions only run within rft.draw_groups, under its planner settings.

CREATE FUNCTION rft.wake_items(of_run bigint, step integer) RETURNS void
LANGUAGE plpgsql SET enable_seqscan = off SET enable_material = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    items bigint[];
    priorities double precision[];
    times integer[];
    weighed double precision[];
    p record;
BEGIN
    SELECT array_agg(l.item_id), array_agg(l.priority), array_agg(l.times_sampled) INTO items, priorities, times FROM (
        SELECT w.item_id, w.priority, w.times_sampled FROM rft.worklist w
        WHERE w.run_id = of_run AND w.consumer = 'trainer' AND w.resume_step <= step
          AND (SELECT g.status = 'ready' AND g.trainable FROM rft.rollout_group g WHERE g.group_id = w.item_id)
        ORDER BY w.item_id FOR UPDATE OF w SKIP LOCKED) l;
    IF items IS NOT NULL THEN
        weighed := rft.formula_values(of_run, items, priorities, times);
        FOR p IN SELECT * FROM rft.place_items(of_run, items, weighed, times) LOOP
            UPDATE rft.worklist w
            SET available = true, resume_step = NULL, lane = p.lane, draw_weight = p.draw_weight, draw_key = p.draw_key
            WHERE w.run_id = of_run AND w.consumer = 'trainer' AND w.item_kind = 'group' AND w.item_id = p.item_id;
        END LOOP;
    END IF;
END
$$;
COMMENT ON FUNCTION rft.wake_items IS 'Makes groups drawable again whose cooldown has ended, at a new place in their lane.';

CREATE FUNCTION rft.rest_items(of_run bigint, step integer, picked rft.pick[]) RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    l record;
BEGIN
    FOR l IN
        SELECT p.item_id, coalesce(n.lane, '') AS lane, w.times_sampled + 1 AS times, n.max_times_sampled, n.cooldown_steps
        FROM unnest(picked) AS p
        CROSS JOIN LATERAL (
            SELECT times_sampled FROM rft.worklist WHERE run_id = of_run AND consumer = 'trainer' AND item_kind = 'group' AND item_id = p.item_id OFFSET 0) w
        CROSS JOIN LATERAL (
            SELECT g.source, t.taskset FROM rft.rollout_group g JOIN rft.task t USING (task_id) WHERE g.group_id = p.item_id OFFSET 0) g
        LEFT JOIN LATERAL rft.lane_of(of_run, g.source, g.taskset, w.times_sampled + 1) n ON true
    LOOP
        UPDATE rft.worklist
        SET available = false, times_sampled = l.times, lane = l.lane,
            resume_step = CASE WHEN l.max_times_sampled IS NULL OR l.max_times_sampled > l.times THEN step + l.cooldown_steps END
        WHERE run_id = of_run AND consumer = 'trainer' AND item_kind = 'group' AND item_id = l.item_id;
    END LOOP;
END
$$;
COMMENT ON FUNCTION rft.rest_items IS 'Moves drawn groups that have uses left to the lane of their next use, for its cooldown.';
