-- Drawing, and what undoes it.

-- The planner does not know how many rows it will be asked for, and must never sort the queue: an index has the order.
CREATE FUNCTION rft.pick_items(
    queue text, of_lane text, below bigint, oldest integer, count integer, besides bigint[]) RETURNS bigint[]
LANGUAGE plpgsql SET enable_sort = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
    picked bigint[];
BEGIN
    SELECT array_agg(p.item_id ORDER BY p.draw_key) INTO picked FROM (
        SELECT w.item_id, w.draw_key FROM rft.worklist w
        WHERE w.consumer = queue AND w.lane = of_lane AND w.available AND w.sort_key < below AND w.policy_step >= oldest
          AND w.item_id <> ALL (besides)
        ORDER BY w.draw_key LIMIT count FOR UPDATE SKIP LOCKED) p;
    RETURN coalesce(picked, '{}');
END
$$;
COMMENT ON FUNCTION rft.pick_items IS 'Locks the first groups of a lane that a step may draw; those that somebody holds at this moment are passed over.';

-- Rank-based prioritisation (Schaul et al. 2016, arXiv 1511.05952, section 3.3): P(i) in proportion to (1 / rank) ^ exponent. Ranks of
-- all groups would change with every one that comes in; so some hundreds are taken, all with the same chance (those that follow a
-- random place of a ring on which each has a random place), and ranked among themselves.
CREATE FUNCTION rft.pick_ranked(
    queue text, of_lane text, below bigint, oldest integer, count integer, besides bigint[], exponent double precision, seed bigint,
    step integer, OUT items bigint[], OUT weights double precision[])
LANGUAGE plpgsql SET enable_sort = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
    candidates CONSTANT integer := greatest(512, 16 * count);
    start CONSTANT double precision := exp(-rft.race_time(seed, step, -1));
    c record;
BEGIN
    items := '{}';
    weights := '{}';
    FOR c IN
        WITH near AS MATERIALIZED (
            (SELECT item_id, draw_weight, 0 AS round, draw_key FROM rft.worklist
             WHERE consumer = queue AND lane = of_lane AND available AND draw_key >= start AND sort_key < below AND policy_step >= oldest
               AND item_id <> ALL (besides)
             ORDER BY draw_key LIMIT candidates)
            UNION ALL
            (SELECT item_id, draw_weight, 1, draw_key FROM rft.worklist
             WHERE consumer = queue AND lane = of_lane AND available AND draw_key < start AND sort_key < below AND policy_step >= oldest
               AND item_id <> ALL (besides)
             ORDER BY draw_key LIMIT candidates)),
        ranked AS MATERIALIZED (
            SELECT n.item_id, power(row_number() OVER (ORDER BY n.draw_weight DESC, n.item_id), -exponent) AS weight
            FROM (SELECT * FROM near ORDER BY round, draw_key LIMIT candidates) n)
        SELECT item_id, weight FROM ranked ORDER BY rft.race_time(seed, item_id, step) / weight
    LOOP
        EXIT WHEN cardinality(items) >= count;
        PERFORM FROM rft.worklist
        WHERE consumer = queue AND item_kind = 'group' AND item_id = c.item_id AND available FOR UPDATE SKIP LOCKED;
        IF FOUND THEN
            items := items || c.item_id;
            weights := weights || c.weight;
        END IF;
    END LOOP;
END
$$;
COMMENT ON FUNCTION rft.pick_ranked IS 'Locks groups of a lane, drawn without replacement in proportion to (1 / rank by priority) ^ exponent among 512 of them or 16 times as many as asked for; their weights.';

CREATE FUNCTION rft.pick_from_lane(
    l rft.sampler_lane, below bigint, oldest integer, count integer, besides bigint[], seed bigint, step integer, OUT items bigint[],
    OUT weights double precision[])
LANGUAGE plpgsql
AS $$
DECLARE
    queue CONSTANT text := 'trainer/' || l.run_id;
BEGIN
    IF l.sample_order = 'rank' THEN
        SELECT p.items, p.weights INTO items, weights
        FROM rft.pick_ranked(queue, l.lane, below, oldest, count, besides, l.priority_exponent, seed, step) p;
    ELSE
        items := rft.pick_items(queue, l.lane, below, oldest, count, besides);
        weights := array_fill(NULL::double precision, ARRAY[cardinality(items)]);
    END IF;
END
$$;
COMMENT ON FUNCTION rft.pick_from_lane IS 'Locks groups of a lane by its order; weights: (1 / rank) ^ exponent, NULL for orders that keep theirs in the worklist.';

CREATE FUNCTION rft.wake_items(of_run bigint, step integer) RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    queue CONSTANT text := 'trainer/' || of_run;
    items bigint[];
    priorities double precision[];
    times integer[];
    weighed double precision[];
    p record;
BEGIN
    SELECT array_agg(l.item_id), array_agg(l.priority), array_agg(l.times_sampled) INTO items, priorities, times FROM (
        SELECT w.item_id, w.priority, w.times_sampled FROM rft.worklist w
        WHERE w.consumer = queue AND w.resume_step <= step
          AND (SELECT g.status = 'ready' AND g.trainable FROM rft.rollout_group g WHERE g.group_id = w.item_id)
        ORDER BY w.item_id FOR UPDATE OF w SKIP LOCKED) l;
    IF items IS NOT NULL THEN
        weighed := rft.formula_values(of_run, items, priorities, times);
        FOR p IN SELECT * FROM rft.place_items(of_run, items, weighed, times) LOOP
            UPDATE rft.worklist w
            SET available = true, resume_step = NULL, lane = p.lane, draw_weight = p.draw_weight, draw_key = p.draw_key
            WHERE w.consumer = queue AND w.item_kind = 'group' AND w.item_id = p.item_id;
        END LOOP;
    END IF;
END
$$;
COMMENT ON FUNCTION rft.wake_items IS 'Groups that have rested long enough can be drawn again, from a new place in their lane.';

CREATE FUNCTION rft.age_out(of_run bigint, step integer, staleness_limit integer) RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    queue CONSTANT text := 'trainer/' || of_run;
    old record;
    aged boolean := false;
BEGIN
    -- The least is one look into an index.
    IF coalesce((SELECT min(policy_step) FROM rft.worklist WHERE consumer = queue AND available), 2147483647) >= step - 1 - staleness_limit THEN
        RETURN;
    END IF;
    -- A group that was drawn has had its turn: it leaves the worklist, and nothing is planned in its place.
    FOR old IN
        SELECT w.item_id FROM rft.worklist w
        WHERE w.consumer = queue AND w.item_kind = 'group' AND w.available AND w.policy_step < step - 1 - staleness_limit ORDER BY w.item_id
    LOOP
        PERFORM FROM rft.rollout_group WHERE group_id = old.item_id FOR UPDATE SKIP LOCKED;
        CONTINUE WHEN NOT FOUND;
        UPDATE rft.worklist SET available = false
        WHERE consumer = queue AND item_kind = 'group' AND item_id = old.item_id AND available
        RETURNING item_id, policy_step, times_sampled INTO old;
        IF FOUND AND old.times_sampled = 0 THEN
            UPDATE rft.rollout_group
            SET trainable = false, closed_reason = format(
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
COMMENT ON FUNCTION rft.age_out IS 'Groups too old for a step leave the worklist; the place of one that was never drawn goes back to the planner.';

CREATE FUNCTION rft.num_planned(step integer, per_step double precision) RETURNS integer
LANGUAGE sql IMMUTABLE
AS $$ SELECT (ceil(round((step * per_step)::numeric, 6)) - ceil(round(((step - 1) * per_step)::numeric, 6)))::integer $$;
COMMENT ON FUNCTION rft.num_planned IS 'New groups that are planned for a trainer step, from 1, where a step takes so many on average.';

-- What can still come for a step.
CREATE FUNCTION rft.outlook(
    of_run bigint, step integer, later_too boolean, short_lanes text[], OUT undecided bigint, OUT base bigint, OUT refills bigint)
LANGUAGE sql STABLE
AS $$
    SELECT count(*) FILTER (WHERE g.trainable AND g.status IN ('planned', 'claimed', 'sealed') AND
                                  (later_too OR g.explore_step < step) AND
                                  (short_lanes IS NULL OR EXISTS (
                                      SELECT FROM rft.task t CROSS JOIN LATERAL rft.lane_of(of_run, g.source, t.taskset, 0) l
                                      WHERE t.task_id = g.task_id AND l.lane = ANY (short_lanes)))),
           count(*) FILTER (WHERE g.explore_step = step - 1 AND NOT g.is_refill AND rft.is_paced(g)),
           count(*) FILTER (WHERE g.explore_step = step - 1 AND g.is_refill)
    FROM rft.rollout_group g
    WHERE g.run_id = of_run AND g.left_by IS NULL AND (g.explore_step = step - 1 OR g.status IN ('planned', 'claimed', 'sealed'))
$$;
COMMENT ON FUNCTION rft.outlook IS 'For a step: groups that are not decided yet (of some lanes; NULL: of any; of later explorer steps too, where they count), and how many were planned and refilled for it.';

DROP FUNCTION rft.draw_groups(bigint, bigint, integer, integer, integer, integer);

-- The statements of one draw in one round trip. Locks: the run's row in share mode (a take-over waits for us), the run's draws (two
-- readers take turns, so that one step is drawn once and shares are exact), then groups that age out, then the worklist items
-- picked; those that a relabel holds at this moment are passed over.
CREATE FUNCTION rft.draw_groups(
    of_run bigint, of_attempt bigint, step integer, wanted integer, refill_limit integer, OUT outcome text, OUT reason text)
LANGUAGE plpgsql
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
    fresh integer;
    may_come boolean;
    short_lanes text[];
    supplied CONSTANT text[] := rft.explorer_lanes(of_run);
    outlook record;
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
        SELECT * INTO outlook FROM rft.outlook(
            of_run, step, r.mode = 'train' OR allowed < wanted, CASE WHEN num_lanes > 1 THEN short_lanes END) o;
        SELECT count(*) INTO fresh FROM (
            SELECT FROM rft.worklist
            WHERE consumer = queue AND available AND times_sampled = 0 AND sort_key < below AND lane = ANY (supplied) LIMIT wanted) w;
        -- As the planner counts: it plans what a step is due, and in the place of what was lost.
        may_come := outlook.undecided > 0 OR (r.mode <> 'train' AND short_lanes && supplied AND (
            outlook.base < rft.num_planned(step, wanted * s.fresh_share)
            OR (outlook.refills < refill_limit AND fresh < rft.num_planned(step, wanted * s.fresh_share))));
        IF NOT may_come AND allowed = wanted THEN
            -- What somebody else holds at this moment comes back. One statement, and so one snapshot, looks for both: a label may take
            -- a group from the queue to the undecided ones between two.
            SELECT bool_or(x.waiting > t.taken) OR (SELECT o.undecided > 0 FROM rft.outlook(
                of_run, step, r.mode = 'train' OR allowed < wanted, CASE WHEN num_lanes > 1 THEN short_lanes END) o)
            INTO may_come FROM unnest(lanes, assigned, taken) AS t (lane, assigned, taken)
            CROSS JOIN LATERAL (
                SELECT count(*) AS waiting FROM (
                    SELECT FROM rft.worklist w WHERE w.consumer = queue AND w.lane = t.lane AND w.available AND w.sort_key < below
                    LIMIT t.assigned) y) x;
        END IF;
        IF may_come THEN
            outcome := 'not yet';
            RETURN;
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
                       ELSE format('%s planned and %s refilled, explorer.max_refill is used up', outlook.base, outlook.refills) END END;
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
COMMENT ON FUNCTION rft.draw_groups IS 'Draws whole ready groups for a trainer step by the run''s policy. outcome: drawn (reason says why a batch is short), not yet, or fenced (the attempt no longer holds the run).';

CREATE FUNCTION rft.return_draws(of_run bigint, of_attempt bigint) RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    queue CONSTANT text := 'trainer/' || of_run;
    parent bigint;
    start_step integer;
    items bigint[];
    priorities double precision[];
    times integer[];
    placed record;
BEGIN
    SELECT a.parent_attempt_id, coalesce(c.trainer_step, 0) INTO parent, start_step
    FROM rft.run_attempt a LEFT JOIN rft.checkpoint c ON c.checkpoint_id = a.from_checkpoint_id WHERE a.attempt_id = of_attempt;
    -- Groups are locked first, as labels lock them: a label in flight either is seen by the statements that follow or sees what
    -- this one did.
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
        WHERE w.consumer = queue AND w.item_kind = 'group' AND (NOT w.available OR w.times_sampled > 0)),
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
        WHERE w.consumer = queue AND w.item_kind = 'group' AND w.item_id = d.item_id
        RETURNING w.item_id, w.priority, w.times_sampled)
    SELECT array_agg(item_id), array_agg(priority), array_agg(times_sampled) INTO items, priorities, times FROM returned;
    -- And its weight is that of the lane it is in again.
    IF items IS NOT NULL THEN
        FOR placed IN SELECT * FROM rft.place_items(of_run, items, rft.formula_values(of_run, items, priorities, times), times) LOOP
            UPDATE rft.worklist SET draw_weight = placed.draw_weight
            WHERE consumer = queue AND item_kind = 'group' AND item_id = placed.item_id AND draw_weight IS DISTINCT FROM placed.draw_weight;
        END LOOP;
    END IF;
END
$$;
COMMENT ON FUNCTION rft.return_draws IS 'What is drawn, rests or can be drawn, folded from the draws of a new attempt''s history: draws after its checkpoint never took place.';

CREATE OR REPLACE FUNCTION rft.reopen_groups(touched bigint[]) RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    item record;
BEGIN
    PERFORM FROM rft.rollout_group WHERE group_id = ANY (touched) ORDER BY group_id FOR UPDATE;

    -- A draw in flight is waited for; what comes after sees what it took. One item after the other, by its key: joined, they could be
    -- planned as comparing each with each.
    FOR item IN SELECT g.group_id, g.run_id FROM rft.rollout_group g WHERE g.group_id = ANY (touched) ORDER BY g.group_id LOOP
        PERFORM FROM rft.worklist
        WHERE consumer = 'trainer/' || item.run_id AND item_kind = 'group' AND item_id = item.group_id FOR UPDATE;
    END LOOP;
    -- A group that was drawn is decided on again only where it can be drawn again.
    WITH open AS (
        UPDATE rft.rollout_group g
        SET status = 'sealed', trainable = true, closed_reason = NULL
        WHERE g.group_id = ANY (touched) AND g.status IN ('sealed', 'ready') AND g.left_by IS NULL
          AND (g.status = 'sealed' OR NOT EXISTS (
              SELECT FROM rft.worklist w
              WHERE w.consumer = 'trainer/' || g.run_id AND w.item_kind = 'group' AND w.item_id = g.group_id AND w.times_sampled > 0
                AND NOT EXISTS (
                    SELECT FROM rft.task t CROSS JOIN LATERAL rft.lane_of(g.run_id, g.source, t.taskset, w.times_sampled) l
                    WHERE t.task_id = g.task_id AND (l.max_times_sampled IS NULL OR l.max_times_sampled > w.times_sampled))))
        RETURNING g.group_id, g.run_id, g.explore_step, g.ordinal)
    INSERT INTO rft.worklist AS w (consumer, item_kind, item_id, sort_key)
    SELECT 'pipeline/' || run_id, 'group', group_id, explore_step::bigint << 32 | ordinal FROM open
    ON CONFLICT (consumer, item_kind, item_id) DO UPDATE SET available = true, claimed_by = NULL, lease_until = NULL;

    FOR item IN SELECT g.group_id, g.run_id FROM rft.rollout_group g WHERE g.group_id = ANY (touched) LOOP
        UPDATE rft.worklist SET available = false
        WHERE consumer = 'trainer/' || item.run_id AND item_kind = 'group' AND item_id = item.group_id AND available;
    END LOOP;

    PERFORM pg_notify('rft_sealed', '');
END
$$;
