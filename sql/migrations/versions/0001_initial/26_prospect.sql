-- What an incomplete batch can still expect, and its completion from other steps and lanes. These functions only run within rft.draw_groups,
-- under its planner settings.

-- Over-sampling runs ahead by part of a batch: what it adds is planned with the first step, carried over from step to step, and trained on
-- at the end, so that a run plans as many groups as it takes.
CREATE FUNCTION rft.num_planned(step integer, per_step double precision, over_sampling double precision, num_steps integer) RETURNS integer
LANGUAGE sql IMMUTABLE
AS $$
    SELECT CASE WHEN step <= 0 THEN 0 ELSE ceil(round((least(step + over_sampling, greatest(num_steps, step)) * per_step)::numeric, 6))::integer END
$$;
COMMENT ON FUNCTION rft.num_planned IS 'Returns how many new groups are planned for the trainer steps up to this one (from 1) if a step takes per_step on average, explorers are ahead by over_sampling of that, and the run has num_steps.';

-- Groups that a step can still expect.
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
COMMENT ON FUNCTION rft.outlook IS 'For a step: the number of undecided groups (of some lanes; NULL: of any; including later explorer steps if they count; then of all steps), and the numbers planned and refilled for it.';

CREATE FUNCTION rft.held_for_review(
    of_run bigint, step integer, later_too boolean, short_lanes text[], OUT num_groups bigint, OUT num_all bigint, OUT num_paced bigint,
    OUT listed text)
LANGUAGE sql STABLE
AS $$
    WITH held AS MATERIALIZED (
        SELECT g.group_id, later_too OR g.explore_step < step AS counts, g.explore_step < step AND rft.is_paced(g) AS paced
        FROM rft.worklist w CROSS JOIN LATERAL (SELECT * FROM rft.rollout_group WHERE group_id = w.item_id OFFSET 0) g
        WHERE w.run_id = of_run AND w.consumer = 'pipeline' AND NOT w.available AND w.claimed_by IS NULL
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
COMMENT ON FUNCTION rft.held_for_review IS 'For a step: the number of groups that wait for a person''s answer (of some lanes; NULL: of any; including later explorer steps if they count; then of all steps), how many take a place that explorers would fill, and their ids as text.';

-- What an incomplete batch can still expect, in one statement and so one snapshot, since between two statements a label may move a group from
-- the queue to the undecided ones. Groups that another transaction has locked become available again (waiting).
CREATE FUNCTION rft.batch_prospects(
    of_run bigint, step integer, wanted integer, refill_limit integer, shares rft.lane_share[], allowed integer, picked rft.pick[],
    OUT may_come boolean, OUT is_held boolean, OUT is_only_held boolean, OUT held text, OUT base bigint, OUT refills bigint)
LANGUAGE plpgsql
AS $$
DECLARE
    below CONSTANT bigint := step::bigint << 32;
    supplied CONSTANT text[] := rft.explorer_lanes(of_run);
    stored_only CONSTANT boolean := (SELECT mode = 'train' FROM rft.run WHERE run_id = of_run);
    later_too CONSTANT boolean := stored_only OR allowed < wanted;
    due integer;
    taken integer;
    short_lanes text[];
    among_lanes text[];
    f record;
BEGIN
    SELECT rft.num_planned(step, wanted * s.fresh_share, s.over_sampling, r.planned_steps)
           - rft.num_planned(step - 1, wanted * s.fresh_share, s.over_sampling, r.planned_steps),
           rft.num_planned(step, wanted * s.fresh_share, 0, 0) - rft.num_planned(step - 1, wanted * s.fresh_share, 0, 0)
    INTO due, taken FROM rft.sampler s JOIN rft.run r USING (run_id) WHERE s.run_id = of_run;
    SELECT array_agg(s.lane) INTO short_lanes FROM unnest(shares) s
    WHERE allowed < wanted OR s.places > (SELECT count(*) FROM unnest(picked) p WHERE p.lane = s.lane);
    among_lanes := CASE WHEN cardinality(shares) > 1 THEN short_lanes END;
    SELECT o.*, h.*, n.fresh, w.waiting INTO f
    FROM rft.outlook(of_run, step, later_too, among_lanes) o,
         rft.held_for_review(of_run, step, later_too, among_lanes) h,
         LATERAL (
             SELECT count(*) AS fresh FROM (
                 SELECT FROM rft.worklist
                 WHERE run_id = of_run AND consumer = 'trainer' AND available AND times_sampled = 0 AND sort_key < below AND lane = ANY (supplied)
                 LIMIT wanted) y) n,
         LATERAL (
             SELECT allowed = wanted AND bool_or(x.waiting > (SELECT count(*) FROM unnest(picked) p WHERE p.lane = s.lane)) AS waiting
             FROM unnest(shares) s
             CROSS JOIN LATERAL (
                 SELECT count(*) AS waiting FROM (
                     SELECT FROM rft.worklist q
                     WHERE q.run_id = of_run AND q.consumer = 'trainer' AND q.lane = s.lane AND q.available AND q.sort_key < below
                     LIMIT s.places) y) x) w;
    -- Counts like the planner, which plans the groups due for a step, and replacements for lost ones.
    may_come := f.waiting OR f.undecided > f.num_groups
        OR (NOT stored_only AND short_lanes && supplied
            AND (f.base < due OR (f.refills < refill_limit AND f.fresh + f.num_paced < taken)));
    is_held := f.num_groups > 0;
    is_only_held := f.all_undecided <= f.num_all;
    held := f.listed;
    base := f.base;
    refills := f.refills;
END
$$;
COMMENT ON FUNCTION rft.batch_prospects IS 'For an incomplete batch: whether more groups may come for its step, whether groups wait for people, whether nothing else is waited for, the waiting groups as text, and the numbers planned and refilled for the step.';

CREATE FUNCTION rft.complete_batch(
    of_run bigint, step integer, oldest integer, wanted integer, refill_limit integer, shares rft.lane_share[], allowed integer,
    picked_first rft.pick[], OUT picked rft.pick[], OUT outcome text, OUT reason text)
LANGUAGE plpgsql
AS $$
DECLARE
    p record;
BEGIN
    SELECT * INTO p FROM rft.batch_prospects(of_run, step, wanted, refill_limit, shares, allowed, picked_first);
    IF p.may_come THEN
        outcome := 'not yet';
        RETURN;
    END IF;
    picked := picked_first;
    IF p.is_held THEN
        -- Only reviews keep this step incomplete. Explorers may be ahead (sync.offset, sync.interval), so groups of their later steps take
        -- the places, and the waiting groups serve a later step. The planner counts them, so it plans no more.
        IF allowed = wanted THEN
            picked := rft.pick_from_lanes(of_run, step, oldest, 9223372036854775807, shares, allowed, picked);
        END IF;
        IF cardinality(picked) < wanted THEN
            outcome := 'not yet';
            reason := CASE WHEN p.is_only_held THEN 'the review of ' || p.held END;
            RETURN;
        END IF;
    END IF;
    -- An exhausted lane: the other lanes fill its places with their remaining groups.
    IF cardinality(shares) > 1 THEN
        picked := rft.pick_from_lanes(
            of_run, step, oldest, step::bigint << 32, ARRAY(SELECT (s.lane, allowed)::rft.lane_share FROM unnest(shares) s), allowed, picked);
    END IF;
    outcome := 'drawn';
    IF cardinality(picked) < wanted THEN
        reason := CASE WHEN allowed < wanted AND cardinality(picked) = allowed
            THEN format('sampling.samples_per_insert allows %s of %s groups: %s became ready', allowed, wanted,
                        (SELECT num_inserted FROM rft.sampler WHERE run_id = of_run))
            ELSE format('%s of %s groups survived: ', cardinality(picked), wanted)
                || CASE WHEN (SELECT mode = 'train' FROM rft.run WHERE run_id = of_run) THEN 'the stored experiences are used up'
                   ELSE format('%s planned and %s refilled, explorer.max_refill is used up', p.base, p.refills) END END;
    END IF;
END
$$;
COMMENT ON FUNCTION rft.complete_batch IS 'Completes a batch from later steps or other lanes if its lanes have too few groups. outcome: drawn (reason: why it is short) or not yet (reason: the reviews, if nothing else is waited for).';
