-- How many groups a draw takes from which lane, and which groups; one function per policy. They only run within rft.draw_groups, under its
-- planner settings.

CREATE TYPE rft.lane_share AS (lane text, places integer);
COMMENT ON TYPE rft.lane_share IS 'Places of a batch that belong to a lane.';

CREATE TYPE rft.pick AS (lane text, item_id bigint, weight double precision);
COMMENT ON TYPE rft.pick IS 'A group picked for a batch, locked in the worklist. weight: (1 / rank) ^ exponent; NULL for orders whose weight is in the worklist.';

-- samples_per_insert: after Cassirer et al. 2021, arXiv 2102.04736.
CREATE FUNCTION rft.num_allowed(of_run bigint, of_attempt bigint, wanted integer) RETURNS integer
LANGUAGE plpgsql
AS $$
DECLARE
    s rft.sampler;
BEGIN
    WITH new AS (DELETE FROM rft.sampler_insert WHERE run_id = of_run RETURNING num_groups)
    UPDATE rft.sampler SET num_inserted = num_inserted + (SELECT coalesce(sum(num_groups), 0) FROM new)
    WHERE run_id = of_run RETURNING * INTO s;
    IF s.num_inserted < s.min_size_to_sample THEN
        RETURN 0;
    END IF;
    RETURN least(wanted, greatest(0, floor(
        s.samples_per_insert * (s.num_inserted - s.min_size_to_sample) + s.error_buffer
        - coalesce((SELECT sum(num_drawn) FROM rft.lane_state(of_run, of_attempt)), 0))));
END
$$;
COMMENT ON FUNCTION rft.num_allowed IS 'Returns how many of the wanted groups a run that limits samples per insert may draw now; also counts the groups that became ready since the last draw.';

CREATE FUNCTION rft.lane_shares(of_run bigint, of_attempt bigint, allowed integer) RETURNS rft.lane_share[]
LANGUAGE plpgsql
AS $$
DECLARE
    lanes CONSTANT text[] := ARRAY(SELECT lane FROM rft.sampler_lane WHERE run_id = of_run ORDER BY place);
BEGIN
    IF cardinality(lanes) = 1 THEN
        RETURN ARRAY[(lanes[1], allowed)::rft.lane_share];
    END IF;
    -- Each place goes to the lane that is furthest behind its ratio.
    RETURN ARRAY(
        SELECT (l.lane, coalesce(q.places, 0))::rft.lane_share
        FROM unnest(lanes) WITH ORDINALITY AS l (lane, nth)
        LEFT JOIN (
            SELECT c.lane, count(*)::integer AS places FROM (
                SELECT x.lane FROM rft.sampler_lane x
                LEFT JOIN rft.lane_state(of_run, of_attempt) y USING (lane)
                CROSS JOIN generate_series(1, allowed) AS k
                WHERE x.run_id = of_run
                ORDER BY (coalesce(y.num_assigned, 0) + k) / x.ratio, x.place LIMIT allowed) c
            GROUP BY c.lane) q USING (lane)
        ORDER BY l.nth);
END
$$;
COMMENT ON FUNCTION rft.lane_shares IS 'Returns the lanes of a run in order, with their places of a batch by their ratios.';

-- The planner does not know how many rows will be fetched, and must never sort the queue, since an index has the order.
CREATE FUNCTION rft.pick_first(l rft.sampler_lane, below bigint, oldest integer, count integer, besides bigint[]) RETURNS rft.pick[]
LANGUAGE plpgsql SET enable_sort = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
    picked rft.pick[];
BEGIN
    SELECT array_agg((l.lane, p.item_id, NULL)::rft.pick ORDER BY p.draw_key) INTO picked FROM (
        SELECT w.item_id, w.draw_key FROM rft.worklist w
        WHERE w.run_id = l.run_id AND w.consumer = 'trainer' AND w.lane = l.lane AND w.available AND w.sort_key < below AND w.policy_step >= oldest
          AND w.item_id <> ALL (besides)
        ORDER BY w.draw_key LIMIT count FOR UPDATE SKIP LOCKED) p;
    RETURN coalesce(picked, '{}');
END
$$;
COMMENT ON FUNCTION rft.pick_first IS 'Locks the first groups of a lane that a step may draw, in the order of their draw_key: fifo, newest, uniform and prioritized. Groups that another transaction has locked are skipped.';

-- Rank-based prioritisation (Schaul et al. 2016, arXiv 1511.05952, section 3.3): P(i) in proportion to (1 / rank) ^ exponent. Every
-- arriving group would change the ranks of all. Instead some hundreds of groups are taken, all with the same probability (those after a
-- random place of a ring on which each has a random place), and ranked among themselves.
CREATE FUNCTION rft.pick_ranked(
    l rft.sampler_lane, below bigint, oldest integer, count integer, besides bigint[], seed bigint, step integer) RETURNS rft.pick[]
LANGUAGE plpgsql SET enable_sort = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
    candidates CONSTANT integer := greatest(512, 16 * count);
    start CONSTANT double precision := exp(-rft.race_time(seed, step, -1));
    picked rft.pick[] := '{}';
    c record;
BEGIN
    FOR c IN
        WITH near AS MATERIALIZED (
            (SELECT item_id, draw_weight, 0 AS round, draw_key FROM rft.worklist
             WHERE run_id = l.run_id AND consumer = 'trainer' AND lane = l.lane AND available AND draw_key >= start AND sort_key < below AND policy_step >= oldest
               AND item_id <> ALL (besides)
             ORDER BY draw_key LIMIT candidates)
            UNION ALL
            (SELECT item_id, draw_weight, 1, draw_key FROM rft.worklist
             WHERE run_id = l.run_id AND consumer = 'trainer' AND lane = l.lane AND available AND draw_key < start AND sort_key < below AND policy_step >= oldest
               AND item_id <> ALL (besides)
             ORDER BY draw_key LIMIT candidates)),
        ranked AS MATERIALIZED (
            SELECT n.item_id, power(row_number() OVER (ORDER BY n.draw_weight DESC, n.item_id), -l.priority_exponent) AS weight
            FROM (SELECT * FROM near ORDER BY round, draw_key LIMIT candidates) n)
        SELECT item_id, weight FROM ranked ORDER BY rft.race_time(seed, item_id, step) / weight
    LOOP
        EXIT WHEN cardinality(picked) >= count;
        PERFORM FROM rft.worklist
        WHERE run_id = l.run_id AND consumer = 'trainer' AND item_kind = 'group' AND item_id = c.item_id AND available FOR UPDATE SKIP LOCKED;
        IF FOUND THEN
            picked := picked || (l.lane, c.item_id, c.weight)::rft.pick;
        END IF;
    END LOOP;
    RETURN picked;
END
$$;
COMMENT ON FUNCTION rft.pick_ranked IS 'Locks groups of a lane, drawn without replacement in proportion to (1 / rank by priority) ^ exponent among 512 groups, or 16 times as many as wanted.';

CREATE FUNCTION rft.pick_from_lanes(
    of_run bigint, step integer, oldest integer, below bigint, shares rft.lane_share[], allowed integer, picked rft.pick[])
RETURNS rft.pick[]
LANGUAGE plpgsql
AS $$
DECLARE
    l record;
    mine bigint[];
    num_missing integer;
BEGIN
    FOR l IN
        SELECT n AS policy, s.places, r.seed
        FROM unnest(shares) WITH ORDINALITY AS s (lane, places, nth)
        JOIN rft.sampler_lane n ON n.run_id = of_run AND n.lane = s.lane
        JOIN rft.run r ON r.run_id = of_run
        ORDER BY s.nth
    LOOP
        mine := ARRAY(SELECT p.item_id FROM unnest(picked) p WHERE p.lane = (l.policy).lane);
        num_missing := least(l.places - cardinality(mine), allowed - cardinality(picked));
        CONTINUE WHEN num_missing <= 0;
        picked := picked || CASE (l.policy).sample_order
            WHEN 'rank' THEN rft.pick_ranked(l.policy, below, oldest, num_missing, mine, l.seed, step)
            ELSE rft.pick_first(l.policy, below, oldest, num_missing, mine) END;
    END LOOP;
    RETURN picked;
END
$$;
COMMENT ON FUNCTION rft.pick_from_lanes IS 'Adds groups of each lane, in its order, to those already picked, until the lane has its share or the batch has as many as allowed.';
