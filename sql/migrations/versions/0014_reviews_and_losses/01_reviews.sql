-- A group that waits for a person must not keep a trainer from groups that are ready, where explorers may be ahead of it.

DROP FUNCTION rft.outlook(bigint, integer, boolean, text[]);

-- What can still come for a step.
CREATE FUNCTION rft.outlook(
    of_run bigint, step integer, later_too boolean, short_lanes text[], OUT undecided bigint, OUT all_undecided bigint, OUT base bigint,
    OUT refills bigint)
LANGUAGE sql STABLE
AS $$
    SELECT count(*) FILTER (WHERE u.undecided AND (later_too OR g.explore_step < step)), count(*) FILTER (WHERE u.undecided),
           count(*) FILTER (WHERE g.explore_step = step - 1 AND NOT g.is_refill AND rft.is_paced(g)),
           count(*) FILTER (WHERE g.explore_step = step - 1 AND g.is_refill)
    FROM rft.rollout_group g
    CROSS JOIN LATERAL (
        SELECT g.trainable AND g.status IN ('planned', 'claimed', 'sealed') AND (short_lanes IS NULL OR EXISTS (
            SELECT FROM rft.task t CROSS JOIN LATERAL rft.lane_of(of_run, g.source, t.taskset, 0) l
            WHERE t.task_id = g.task_id AND l.lane = ANY (short_lanes))) AS undecided OFFSET 0) u
    WHERE g.run_id = of_run AND g.left_by IS NULL AND (g.explore_step = step - 1 OR g.status IN ('planned', 'claimed', 'sealed'))
$$;
COMMENT ON FUNCTION rft.outlook IS 'For a step: groups that are not decided yet (of some lanes; NULL: of any; of later explorer steps too, where they count; then of all steps), and how many were planned and refilled for it.';

CREATE FUNCTION rft.held_for_review(
    of_run bigint, step integer, later_too boolean, short_lanes text[], OUT num_groups bigint, OUT num_all bigint, OUT num_paced bigint,
    OUT listed text)
LANGUAGE sql STABLE
AS $$
    WITH held AS MATERIALIZED (
        SELECT g.group_id, later_too OR g.explore_step < step AS counts, g.explore_step < step AND rft.is_paced(g) AS paced
        FROM rft.worklist w CROSS JOIN LATERAL (SELECT * FROM rft.rollout_group WHERE group_id = w.item_id OFFSET 0) g
        WHERE w.consumer = 'pipeline/' || of_run AND NOT w.available AND w.claimed_by IS NULL
          AND w.item_kind = 'group' AND w.lease_until > rft.clock() AND g.trainable AND g.status = 'sealed' AND g.left_by IS NULL
          AND (short_lanes IS NULL OR EXISTS (
              SELECT FROM rft.task t CROSS JOIN LATERAL rft.lane_of(of_run, g.source, t.taskset, 0) l
              WHERE t.task_id = g.task_id AND l.lane = ANY (short_lanes))))
    SELECT count(*) FILTER (WHERE counts), count(*), count(*) FILTER (WHERE paced),
           CASE WHEN count(*) > 1 THEN 'groups ' ELSE 'group ' END
           || array_to_string((array_agg(group_id ORDER BY group_id))[1:3], ', ')
           || CASE WHEN count(*) > 3 THEN format(' and %s more', count(*) - 3) ELSE '' END
    FROM held
$$;
COMMENT ON FUNCTION rft.held_for_review IS 'For a step: groups that wait for the answer of a person (of some lanes; NULL: of any; of later explorer steps too, where they count; then of all steps), how many fill a place that explorers would, and the ids of all in words.';

-- The statements of one draw in one round trip. Locks: the run's row in share mode (a take-over waits for us), the run's draws (two
-- readers take turns, so that one step is drawn once and shares are exact), then groups that age out, then the worklist items
-- picked; those that a relabel holds at this moment are passed over.
CREATE OR REPLACE FUNCTION rft.draw_groups(
    of_run bigint, of_attempt bigint, step integer, wanted integer, refill_limit integer, OUT outcome text, OUT reason text)
LANGUAGE plpgsql SET enable_seqscan = off SET enable_material = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    queue CONSTANT text := 'trainer/' || of_run;
    below CONSTANT bigint := step::bigint << 32;
    oldest integer;
    r rft.run;
    s rft.sampler;
    l record;
    lanes text[] := '{}';           -- of the policy, in their places
    assigned bigint[] := '{}';      -- places of this batch that are a lane's
    taken bigint[] := '{}';         -- groups picked from it
    picked bigint[] := '{}';
    picked_lanes text[] := '{}';
    picked_weights double precision[] := '{}';
    items bigint[];
    weights double precision[];
    found_before integer;
    allowed integer := wanted;
    may_come boolean;
    short_lanes text[];
    supplied CONSTANT text[] := rft.explorer_lanes(of_run);
    standing record;                -- what can still come, and what waits for people
    num_lanes integer;
    keeps_state boolean;
    reuses boolean;
BEGIN
    SELECT * INTO r FROM rft.run WHERE run_id = of_run AND current_attempt_id = of_attempt FOR SHARE;
    IF NOT FOUND THEN
        outcome := 'fenced';
        RETURN;
    END IF;
    PERFORM pg_advisory_xact_lock(hashtext('rft.draw'), of_run::integer);
    outcome := 'drawn';
    SELECT count(DISTINCT item_id) INTO found_before FROM rft.draw WHERE attempt_id = of_attempt AND trainer_step = step;
    IF found_before > 0 THEN
        IF found_before < wanted THEN
            reason := format('%s of %s groups were drawn for this step before', found_before, wanted);
        END IF;
        RETURN;
    END IF;

    SELECT * INTO s FROM rft.sampler WHERE run_id = of_run;
    SELECT count(*), bool_or(n.max_times_sampled IS NULL OR n.max_times_sampled > 1), count(*) > 1 OR s.samples_per_insert IS NOT NULL
               OR bool_or(n.sample_order IN ('uniform', 'prioritized'))
    INTO num_lanes, reuses, keeps_state FROM rft.sampler_lane n WHERE n.run_id = of_run;
    oldest := step - 1 - s.max_staleness;
    IF reuses THEN
        PERFORM rft.wake_items(of_run, step);
    END IF;
    PERFORM rft.age_out(of_run, step, s.max_staleness);

    IF s.samples_per_insert IS NOT NULL THEN
        WITH new AS (DELETE FROM rft.sampler_insert WHERE run_id = of_run RETURNING num_groups)
        UPDATE rft.sampler SET num_inserted = num_inserted + (SELECT coalesce(sum(num_groups), 0) FROM new)
        WHERE run_id = of_run RETURNING num_inserted INTO s.num_inserted;
        allowed := CASE WHEN s.num_inserted < s.min_size_to_sample THEN 0 ELSE least(wanted, greatest(0, floor(
            s.samples_per_insert * (s.num_inserted - s.min_size_to_sample) + s.error_buffer
            - coalesce((SELECT sum(num_drawn) FROM rft.lane_state(of_run, of_attempt)), 0))))::integer END;
    END IF;

    -- Each place of the batch goes to the lane that is furthest behind its ratio; first every lane fills its own.
    FOR l IN
        SELECT n.lane, n AS policy, CASE WHEN num_lanes = 1 THEN allowed ELSE coalesce(q.places, 0) END AS places
        FROM rft.sampler_lane n
        LEFT JOIN (
            SELECT c.lane, count(*) AS places FROM (
                SELECT x.lane FROM rft.sampler_lane x
                LEFT JOIN rft.lane_state(of_run, of_attempt) y USING (lane)
                CROSS JOIN generate_series(1, allowed) AS k
                WHERE x.run_id = of_run AND num_lanes > 1
                ORDER BY (coalesce(y.num_assigned, 0) + k) / x.ratio, x.place LIMIT allowed) c
            GROUP BY c.lane) q USING (lane)
        WHERE n.run_id = of_run ORDER BY n.place
    LOOP
        SELECT * INTO items, weights FROM rft.pick_from_lane(l.policy, below, oldest, l.places::integer, '{}', r.seed, step);
        picked := picked || items;
        picked_lanes := picked_lanes || array_fill(l.lane, ARRAY[cardinality(items)]);
        picked_weights := picked_weights || weights;
        lanes := lanes || l.lane;
        assigned := assigned || l.places;
        taken := taken || cardinality(items)::bigint;
        IF cardinality(items) < l.places OR allowed < wanted THEN
            short_lanes := short_lanes || l.lane;
        END IF;
    END LOOP;

    IF short_lanes IS NOT NULL THEN
        -- One statement, and so one snapshot: a label may take a group from the queue to the undecided ones between two. What somebody
        -- else holds at this moment comes back (waiting).
        SELECT o.*, h.*, f.fresh, w.waiting INTO standing
        FROM rft.outlook(of_run, step, r.mode = 'train' OR allowed < wanted, CASE WHEN num_lanes > 1 THEN short_lanes END) o,
             rft.held_for_review(of_run, step, r.mode = 'train' OR allowed < wanted, CASE WHEN num_lanes > 1 THEN short_lanes END) h,
             LATERAL (
                 SELECT count(*) AS fresh FROM (
                     SELECT FROM rft.worklist
                     WHERE consumer = queue AND available AND times_sampled = 0 AND sort_key < below AND lane = ANY (supplied)
                     LIMIT wanted) y) f,
             LATERAL (
                 SELECT allowed = wanted AND bool_or(x.waiting > t.taken) AS waiting
                 FROM unnest(lanes, assigned, taken) AS t (lane, assigned, taken)
                 CROSS JOIN LATERAL (
                     SELECT count(*) AS waiting FROM (
                         SELECT FROM rft.worklist q
                         WHERE q.consumer = queue AND q.lane = t.lane AND q.available AND q.sort_key < below
                         LIMIT t.assigned) y) x) w;
        -- As the planner counts: it plans what a step is due, and in the place of what was lost.
        may_come := standing.waiting OR standing.undecided > standing.num_groups
            OR (r.mode <> 'train' AND short_lanes && supplied AND (
                standing.base < rft.num_planned(step, wanted * s.fresh_share)
                OR (standing.refills < refill_limit
                    AND standing.fresh + standing.num_paced < rft.num_planned(step, wanted * s.fresh_share))));
        IF may_come THEN
            outcome := 'not yet';
            RETURN;
        END IF;
        IF standing.num_groups > 0 THEN
            -- Only people keep back what this step still lacks. Explorers may be ahead (sync.offset, sync.interval): groups of their later
            -- steps take the places, and the groups that wait are for a later step. They count for the planner, so it plans no more.
            FOR i IN 1 .. CASE WHEN allowed = wanted THEN cardinality(lanes) ELSE 0 END LOOP
                CONTINUE WHEN taken[i] >= assigned[i];
                SELECT p.items, p.weights INTO items, weights FROM rft.sampler_lane n
                CROSS JOIN LATERAL rft.pick_from_lane(
                    n, 9223372036854775807, oldest, (assigned[i] - taken[i])::integer, picked, r.seed, step) p
                WHERE n.run_id = of_run AND n.lane = lanes[i];
                picked := picked || items;
                picked_lanes := picked_lanes || array_fill(lanes[i], ARRAY[cardinality(items)]);
                picked_weights := picked_weights || weights;
                taken[i] := taken[i] + cardinality(items);
            END LOOP;
            IF cardinality(picked) < wanted THEN
                outcome := 'not yet';
                reason := CASE WHEN standing.all_undecided <= standing.num_all THEN 'the review of ' || standing.listed END;
                RETURN;
            END IF;
        END IF;
        -- A lane that has run dry: the others fill its places with what they have left.
        FOR i IN 1 .. cardinality(lanes) LOOP
            EXIT WHEN cardinality(picked) >= allowed OR num_lanes = 1;
            SELECT p.items, p.weights INTO items, weights FROM rft.sampler_lane n
            CROSS JOIN LATERAL rft.pick_from_lane(n, below, oldest, allowed - cardinality(picked), picked, r.seed, step) p
            WHERE n.run_id = of_run AND n.lane = lanes[i];
            picked := picked || items;
            picked_lanes := picked_lanes || array_fill(lanes[i], ARRAY[cardinality(items)]);
            picked_weights := picked_weights || weights;
            taken[i] := taken[i] + cardinality(items);
        END LOOP;
        IF cardinality(picked) < wanted THEN
            reason := CASE WHEN allowed < wanted AND cardinality(picked) = allowed
                THEN format('sampling.samples_per_insert allows %s of %s groups: %s became ready', allowed, wanted, s.num_inserted)
                ELSE format('%s of %s groups survived: ', cardinality(picked), wanted)
                    || CASE WHEN r.mode = 'train' THEN 'the stored experiences are used up'
                       ELSE format('%s planned and %s refilled, explorer.max_refill is used up', standing.base, standing.refills) END END;
        END IF;
    END IF;

    -- Every experience drawn is noted with its reward as it stands. OFFSET 0: items are looked up by their keys, whatever the planner
    -- thinks of the length of the queue.
    WITH item AS (
        SELECT p.place, w.item_id, w.policy_step, w.draw_key,
               CASE n.sample_order
               WHEN 'prioritized' THEN power(min(w.draw_weight) OVER (PARTITION BY p.lane) / w.draw_weight, n.importance_exponent)
               WHEN 'rank' THEN power(min(p.weight) OVER (PARTITION BY p.lane) / p.weight, n.importance_exponent) END AS importance
        FROM unnest(picked, picked_lanes, picked_weights) WITH ORDINALITY AS p (item_id, lane, weight, place)
        CROSS JOIN LATERAL (
            SELECT * FROM rft.worklist WHERE consumer = queue AND item_kind = 'group' AND item_id = p.item_id OFFSET 0) w
        JOIN rft.sampler_lane n ON n.run_id = of_run AND n.lane = p.lane)
    INSERT INTO rft.draw (attempt_id, trainer_step, slot, item_kind, item_id, experience_id, reward_used, staleness,
        importance_weight, draw_key)
    SELECT of_attempt, step, row_number() OVER (ORDER BY p.place, o.rollout_index, e.turn_index) - 1, 'group', p.item_id,
           e.experience_id, CASE WHEN e.reward_final THEN e.reward ELSE coalesce(v.reward, e.reward) END,
           CASE WHEN p.policy_step = 2147483647 THEN 0 ELSE step - 1 - p.policy_step END, p.importance,
           CASE WHEN reuses THEN p.draw_key END
    FROM item p
    JOIN rft.experience e ON e.group_id = p.item_id
    JOIN rft.rollout o USING (rollout_id)
    LEFT JOIN LATERAL (
        SELECT v.kept, v.reward FROM rft.verdict v
        WHERE v.experience_id = e.experience_id AND v.pipeline_version = r.pipeline_version
        ORDER BY v.verdict_id DESC LIMIT 1) v ON true
    WHERE coalesce(v.kept, r.pipeline_version = 'none');

    IF keeps_state AND cardinality(picked) > 0 THEN
        INSERT INTO rft.sampler_step (attempt_id, trainer_step, lane, epoch, draw_number, num_assigned, num_drawn, clock)
        SELECT of_attempt, step, t.lane, s.epoch, coalesce((SELECT max(draw_number) FROM rft.lane_state(of_run, of_attempt)), 0) + 1,
               coalesce(y.num_assigned, 0) + t.assigned, coalesce(y.num_drawn, 0) + t.taken,
               greatest(coalesce(y.clock, 0), CASE WHEN n.sample_order IN ('uniform', 'prioritized') THEN (
                   SELECT max(w.draw_key) FROM unnest(picked, picked_lanes) AS p (item_id, lane)
                   CROSS JOIN LATERAL (
                       SELECT draw_key FROM rft.worklist WHERE consumer = queue AND item_kind = 'group' AND item_id = p.item_id OFFSET 0) w
                   WHERE p.lane = t.lane) END)
        FROM unnest(lanes, assigned, taken) AS t (lane, assigned, taken)
        JOIN rft.sampler_lane n ON n.run_id = of_run AND n.lane = t.lane
        LEFT JOIN rft.lane_state(of_run, of_attempt) y ON y.lane = t.lane;
    END IF;

    IF reuses THEN
        FOR l IN
            SELECT p.item_id, coalesce(n.lane, '') AS lane, w.times_sampled + 1 AS times, n.max_times_sampled, n.cooldown_steps
            FROM unnest(picked) AS p (item_id)
            CROSS JOIN LATERAL (
                SELECT times_sampled FROM rft.worklist WHERE consumer = queue AND item_kind = 'group' AND item_id = p.item_id OFFSET 0) w
            CROSS JOIN LATERAL (
                SELECT g.source, t.taskset FROM rft.rollout_group g JOIN rft.task t USING (task_id) WHERE g.group_id = p.item_id OFFSET 0) g
            LEFT JOIN LATERAL rft.lane_of(of_run, g.source, g.taskset, w.times_sampled + 1) n ON true
        LOOP
            UPDATE rft.worklist
            SET available = false, times_sampled = l.times, lane = l.lane,
                resume_step = CASE WHEN l.max_times_sampled IS NULL OR l.max_times_sampled > l.times THEN step + l.cooldown_steps END
            WHERE consumer = queue AND item_kind = 'group' AND item_id = l.item_id;
        END LOOP;
    ELSE
        UPDATE rft.worklist w SET available = false, times_sampled = w.times_sampled + 1
        WHERE w.consumer = queue AND w.item_kind = 'group' AND w.item_id = ANY (picked);
    END IF;
END
$$;
COMMENT ON FUNCTION rft.draw_groups IS 'Draws whole ready groups for a trainer step by the run''s policy. outcome: drawn (reason says why a batch is short), not yet (reason names the reviews, where nothing else is waited for), or fenced (the attempt no longer holds the run).';
