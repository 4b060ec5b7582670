-- A group's place in its lane. uniform and prioritized are races: a group that arrives at time T of its lane's clock finishes at
-- T + E / weight, with E exponentially distributed. Draws take the groups that finish first, and the clock is that of the last one drawn.
-- Since an exponential time has no memory, at every moment each group is next with probability weight / sum of weights, whenever it
-- arrived and whatever happened to others. A draw from the low end of an index is therefore an exact weighted sample without
-- replacement, at the cost of first in first out.

CREATE FUNCTION rft.race_time(seed bigint, item_id bigint, times_sampled integer) RETURNS double precision
LANGUAGE sql IMMUTABLE
AS $$
    SELECT -ln((((hashint8extended(hashint8extended(item_id, seed), times_sampled) >> 11) & 9007199254740991) + 0.5::double precision)
               / 9007199254740992)
$$;
COMMENT ON FUNCTION rft.race_time IS 'Returns a number from the exponential distribution with mean 1, determined by the run''s seed, the group and the number of its draws.';

CREATE FUNCTION rft.draw_weight(sample_order rft.sample_order, value double precision, exponent double precision) RETURNS double precision
LANGUAGE sql IMMUTABLE
AS $$
    SELECT CASE sample_order
           WHEN 'prioritized' THEN greatest(power(least(greatest(coalesce(nullif(value, 'NaN'), 0), 0), 1e6), exponent), 1e-6)
           WHEN 'rank' THEN coalesce(nullif(value, 'NaN'), 0) ELSE 1 END
$$;
COMMENT ON FUNCTION rft.draw_weight IS 'Returns the priority to the power of the exponent, between 1e-6 and 1e6 to that power; missing and negative priorities count as 0. Rank: the priority itself. 1 for other orders.';

CREATE FUNCTION rft.draw_key(
    sample_order rft.sample_order, sort_key bigint, weight double precision, clock double precision, seed bigint, item_id bigint,
    times_sampled integer) RETURNS double precision
LANGUAGE sql IMMUTABLE
AS $$
    SELECT CASE sample_order WHEN 'fifo' THEN sort_key::double precision WHEN 'newest' THEN -sort_key::double precision
           WHEN 'rank' THEN exp(-rft.race_time(seed, item_id, times_sampled))
           ELSE clock + rft.race_time(seed, item_id, times_sampled) / weight END
$$;
COMMENT ON FUNCTION rft.draw_key IS 'Returns a group''s place in its lane; the least is drawn first. Rank: a place on a ring, uniform from 0 to 1.';

CREATE FUNCTION rft.place_items(of_run bigint, of_items bigint[], of_values double precision[], of_times integer[])
RETURNS TABLE (
    nth integer, item_id bigint, sort_key bigint, lane text, draw_weight double precision, draw_key double precision, clock double precision,
    is_race boolean)
LANGUAGE sql STABLE
AS $$
    -- Computed once for all groups.
    WITH state AS MATERIALIZED (
        SELECT * FROM rft.lane_state(of_run, (SELECT current_attempt_id FROM rft.run WHERE run_id = of_run)))
    -- OFFSET 0: each group is looked up by its key, whatever sizes of tables the planner assumes.
    SELECT i.nth::integer, i.item_id, g.sort_key, coalesce(l.lane, ''), w.weight,
           rft.draw_key(coalesce(l.sample_order, 'fifo'), g.sort_key, w.weight, coalesce(c.clock, 0), r.seed, i.item_id, i.times),
           coalesce(c.clock, 0), coalesce(l.sample_order IN ('uniform', 'prioritized'), false)
    FROM unnest(of_items, of_values, of_times) WITH ORDINALITY AS i (item_id, value, times, nth)
    CROSS JOIN LATERAL (
        SELECT explore_step::bigint << 32 | ordinal AS sort_key, source, task_id FROM rft.rollout_group WHERE group_id = i.item_id OFFSET 0) g
    CROSS JOIN LATERAL (SELECT taskset FROM rft.task WHERE task_id = g.task_id OFFSET 0) t
    JOIN rft.run r ON r.run_id = of_run
    LEFT JOIN LATERAL rft.lane_of(of_run, g.source, t.taskset, i.times) l ON true
    CROSS JOIN LATERAL (SELECT rft.draw_weight(coalesce(l.sample_order, 'fifo'), i.value, l.priority_exponent) AS weight) w
    LEFT JOIN state c ON c.lane = l.lane
$$;
COMMENT ON FUNCTION rft.place_items IS 'Returns lane, weight and key of groups that arrive now, given their formula''s value and their number of draws; nth numbers them from 1.';

CREATE FUNCTION rft.ready_groups(of_groups bigint[], of_priorities double precision[]) RETURNS void
LANGUAGE plpgsql SET enable_seqscan = off SET enable_material = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    of_run bigint;
    limited boolean;
    num_new integer;
    times integer[];
    weighed double precision[];
BEGIN
    IF cardinality(of_groups) = 0 THEN
        RETURN;
    END IF;
    SELECT run_id INTO of_run FROM rft.rollout_group WHERE group_id = of_groups[1];
    UPDATE rft.rollout_group g SET status = 'ready', ready_at = clock_timestamp(), trainable = true, closed_reason = NULL,
        aged_out = false,
        decided_by = (SELECT pipeline_version FROM rft.run WHERE run_id = of_run),
        sealed_at = coalesce(g.sealed_at, clock_timestamp()), lease_until = NULL
    WHERE g.group_id = ANY (of_groups);

    SELECT array_agg(coalesce((
        SELECT w.times_sampled FROM rft.worklist w
        WHERE w.run_id = of_run AND w.consumer = 'trainer' AND w.item_kind = 'group' AND w.item_id = i.item_id), 0) ORDER BY i.place) INTO times
    FROM unnest(of_groups) WITH ORDINALITY AS i (item_id, place);
    weighed := rft.formula_values(of_run, of_groups, of_priorities, times);

    -- The age is that of the oldest token, or of the step at which this history left that policy's attempt. A group that no policy
    -- sampled (demonstrations) does not age.
    WITH written AS (
        INSERT INTO rft.worklist AS w (run_id, consumer, item_kind, item_id, sort_key, priority, lane, draw_weight, draw_key, policy_step)
        SELECT of_run, 'trainer', 'group', p.item_id, p.sort_key, of_priorities[p.nth], p.lane, p.draw_weight,
               CASE WHEN NOT p.is_race OR k.item_id IS NULL THEN p.draw_key
                    -- The remaining distance, at the new weight.
                    ELSE p.clock + greatest(k.draw_key - p.clock, 0) * k.draw_weight / p.draw_weight END,
               coalesce((SELECT min(least(v.trainer_step, h.last_step)) FROM rft.experience e
                         JOIN rft.policy_version v ON v.policy_version_id = e.policy_version_min
                         LEFT JOIN rft.attempt_history h ON h.history_id = u.current_attempt_id AND h.attempt_id = v.attempt_id
                         WHERE e.group_id = p.item_id), 2147483647)
        FROM rft.place_items(of_run, of_groups, weighed, times) p
        JOIN rft.run u ON u.run_id = of_run
        LEFT JOIN LATERAL (
            SELECT item_id, draw_key, draw_weight FROM rft.worklist
            WHERE run_id = of_run AND consumer = 'trainer' AND item_kind = 'group' AND item_id = p.item_id OFFSET 0) k ON true
        ON CONFLICT (run_id, consumer, item_kind, item_id) DO UPDATE
        SET available = w.resume_step IS NULL, priority = excluded.priority, lane = excluded.lane, draw_weight = excluded.draw_weight,
            draw_key = excluded.draw_key
        RETURNING xmax = 0 AS is_new)
    SELECT count(*) FILTER (WHERE is_new) INTO num_new FROM written;

    SELECT samples_per_insert IS NOT NULL INTO limited FROM rft.sampler WHERE run_id = of_run;
    IF limited AND num_new > 0 THEN
        INSERT INTO rft.sampler_insert (run_id, num_groups) VALUES (of_run, num_new);
    END IF;
END
$$;
COMMENT ON FUNCTION rft.ready_groups IS 'Makes groups of one run drawable whose verdicts kept experiences, with the pipeline''s priorities. The caller holds the run''s row, so that its policy does not change meanwhile.';

CREATE FUNCTION rft.place_all(of_run bigint) RETURNS void
LANGUAGE plpgsql SET enable_seqscan = off SET enable_material = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    items bigint[];
    priorities double precision[];
    times integer[];
    weighed double precision[];
    p record;
BEGIN
    DELETE FROM rft.sampler_insert WHERE run_id = of_run;
    UPDATE rft.sampler s SET num_inserted = CASE WHEN s.samples_per_insert IS NULL THEN 0 ELSE (
        SELECT count(*) FROM rft.worklist w WHERE w.run_id = of_run AND w.consumer = 'trainer' AND w.available AND w.times_sampled = 0) END
    WHERE s.run_id = of_run;
    -- Locked in the order in which labels lock them.
    SELECT array_agg(l.item_id), array_agg(l.priority), array_agg(l.times_sampled) INTO items, priorities, times FROM (
        SELECT w.item_id, w.priority, w.times_sampled FROM rft.worklist w
        WHERE w.run_id = of_run AND w.consumer = 'trainer' AND w.item_kind = 'group' ORDER BY w.item_id FOR UPDATE) l;
    weighed := rft.formula_values(of_run, items, priorities, times);
    FOR p IN SELECT * FROM rft.place_items(of_run, items, weighed, times) LOOP
        UPDATE rft.worklist w SET lane = p.lane, draw_weight = p.draw_weight, draw_key = p.draw_key
        WHERE w.run_id = of_run AND w.consumer = 'trainer' AND w.item_kind = 'group' AND w.item_id = p.item_id
          AND (w.lane, w.draw_weight, w.draw_key) IS DISTINCT FROM (p.lane, p.draw_weight, p.draw_key);
    END LOOP;
END
$$;
COMMENT ON FUNCTION rft.place_all IS 'Applies a new policy: counts start again, and every group gets its place.';

CREATE FUNCTION rft.set_priorities(of_run bigint, of_items bigint[], of_priorities double precision[]) RETURNS bigint
LANGUAGE plpgsql SET enable_seqscan = off SET enable_material = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    items bigint[];
    priorities double precision[];
    times integer[];
    weighed double precision[];
    p record;
BEGIN
    -- Locked in the order in which labels lock them.
    SELECT array_agg(l.item_id), array_agg(l.priority), array_agg(l.times_sampled) INTO items, priorities, times FROM (
        SELECT w.item_id, n.priority, w.times_sampled
        FROM (SELECT * FROM unnest(of_items, of_priorities) AS u (item_id, priority) ORDER BY u.item_id) n
        CROSS JOIN LATERAL (
            SELECT item_id, times_sampled FROM rft.worklist
            WHERE run_id = of_run AND consumer = 'trainer' AND item_kind = 'group' AND item_id = n.item_id FOR UPDATE) w) l;
    weighed := rft.formula_values(of_run, items, priorities, times);
    FOR p IN SELECT * FROM rft.place_items(of_run, items, weighed, times) LOOP
        UPDATE rft.worklist w
        SET priority = priorities[p.nth], draw_weight = p.draw_weight,
            draw_key = CASE WHEN p.is_race THEN p.clock + greatest(w.draw_key - p.clock, 0) * w.draw_weight / p.draw_weight ELSE w.draw_key END
        WHERE w.run_id = of_run AND w.consumer = 'trainer' AND w.item_kind = 'group' AND w.item_id = p.item_id;
    END LOOP;
    RETURN coalesce(cardinality(items), 0);
END
$$;
COMMENT ON FUNCTION rft.set_priorities IS 'Sets new priorities of groups that wait, rest or were drawn; returns their number.';
