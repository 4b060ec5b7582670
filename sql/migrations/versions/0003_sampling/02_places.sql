-- Where a group stands in its lane. uniform and prioritized are races: a group that comes in at time T of its lane's clock
-- finishes at T + E / weight, with E exponentially distributed; draws take those that finish first, and the clock stands at the last
-- one drawn. Since an exponential time has no memory, the next one is at every moment a given group with probability weight / sum of
-- weights, whenever it came in and whatever happened to others; so a draw from the low end of an index is an exact weighted sample
-- without replacement, at the cost of first in first out.

CREATE FUNCTION rft.race_time(seed bigint, item_id bigint, times_sampled integer) RETURNS double precision
LANGUAGE sql IMMUTABLE
AS $$
    SELECT -ln((((hashint8extended(hashint8extended(item_id, seed), times_sampled) >> 11) & 9007199254740991) + 0.5::double precision)
               / 9007199254740992)
$$;
COMMENT ON FUNCTION rft.race_time IS 'A number from the exponential distribution of mean 1, given by the run''s seed, the group and how often it was drawn.';

CREATE FUNCTION rft.draw_weight(sample_order rft.sample_order, value double precision, exponent double precision) RETURNS double precision
LANGUAGE sql IMMUTABLE
AS $$
    SELECT CASE sample_order
           WHEN 'prioritized' THEN greatest(power(least(greatest(coalesce(nullif(value, 'NaN'), 0), 0), 1e6), exponent), 1e-6)
           WHEN 'rank' THEN coalesce(nullif(value, 'NaN'), 0) ELSE 1 END
$$;
COMMENT ON FUNCTION rft.draw_weight IS 'Priority to the power of the exponent, between 1e-6 and 1e6 to that power; missing and negative priorities count as 0. Rank: the priority itself. 1 for other orders.';

CREATE FUNCTION rft.draw_key(
    sample_order rft.sample_order, sort_key bigint, weight double precision, clock double precision, seed bigint, item_id bigint,
    times_sampled integer) RETURNS double precision
LANGUAGE sql IMMUTABLE
AS $$
    SELECT CASE sample_order WHEN 'fifo' THEN sort_key::double precision WHEN 'newest' THEN -sort_key::double precision
           WHEN 'rank' THEN exp(-rft.race_time(seed, item_id, times_sampled))
           ELSE clock + rft.race_time(seed, item_id, times_sampled) / weight END
$$;
COMMENT ON FUNCTION rft.draw_key IS 'A group''s place in its lane; the least is drawn first. Rank: a place on a ring, uniform from 0 to 1.';

CREATE FUNCTION rft.lane_of(of_run bigint, of_source rft.experience_source, of_taskset text, times integer) RETURNS SETOF rft.sampler_lane
LANGUAGE sql STABLE
AS $$
    SELECT * FROM rft.sampler_lane l
    WHERE l.run_id = of_run AND (l.source IS NULL OR l.source = of_source) AND (l.taskset IS NULL OR l.taskset = of_taskset)
      AND (NOT l.replay OR times > 0)
    ORDER BY l.max_times_sampled IS NULL OR l.max_times_sampled > times DESC, l.replay, l.place LIMIT 1
$$;
COMMENT ON FUNCTION rft.lane_of IS 'The lane of a group of a source and taskset that was drawn so often: the first that takes it and has uses left, replay last; where none has, the first. No row: none takes it.';

CREATE FUNCTION rft.explorer_lanes(of_run bigint) RETURNS text[]
LANGUAGE sql STABLE
AS $$
    SELECT coalesce(array_agg(lane), '{}') FROM rft.sampler_lane
    WHERE run_id = of_run AND NOT replay AND coalesce(source = 'explorer', true)
$$;
COMMENT ON FUNCTION rft.explorer_lanes IS 'The lanes that explorers supply: pacing counts what stands in them.';

CREATE FUNCTION rft.is_paced(g rft.rollout_group) RETURNS boolean
LANGUAGE sql STABLE
AS $$
    SELECT NOT g.is_adopted OR EXISTS (
        SELECT FROM rft.task t CROSS JOIN LATERAL rft.lane_of(g.run_id, g.source, t.taskset, 0) l
        WHERE t.task_id = g.task_id AND l.lane = ANY (rft.explorer_lanes(g.run_id)))
$$;
COMMENT ON FUNCTION rft.is_paced IS 'Whether a group takes a place that explorers would fill: it was planned, or came of itself into a lane that they supply.';

CREATE FUNCTION rft.lane_state(of_run bigint, of_attempt bigint)
RETURNS TABLE (lane text, draw_number bigint, num_assigned bigint, num_drawn bigint, clock double precision)
LANGUAGE sql STABLE
AS $$
    SELECT s.lane, s.draw_number, s.num_assigned, s.num_drawn, s.clock
    FROM (SELECT n.attempt_id, n.trainer_step, n.epoch
          FROM rft.attempt_history h
          CROSS JOIN LATERAL (
              SELECT t.attempt_id, t.trainer_step, t.epoch, t.draw_number FROM rft.sampler_step t
              WHERE t.attempt_id = h.attempt_id AND (h.last_step IS NULL OR t.trainer_step <= h.last_step)
              ORDER BY t.draw_number DESC LIMIT 1) n
          WHERE h.history_id = of_attempt ORDER BY n.draw_number DESC LIMIT 1) newest
    JOIN rft.sampler p ON p.run_id = of_run AND p.epoch = newest.epoch
    JOIN rft.sampler_step s ON s.attempt_id = newest.attempt_id AND s.trainer_step = newest.trainer_step
$$;
COMMENT ON FUNCTION rft.lane_state IS 'Where the lanes stand after the newest draw of a history; no row before the first of the policy''s epoch.';

CREATE FUNCTION rft.formula_columns(of_run bigint, of_items bigint[], of_priorities double precision[], of_times integer[])
RETURNS TABLE (
    group_id bigint, priority double precision, mean_reward double precision, std_reward double precision, min_reward double precision,
    max_reward double precision, num_experiences double precision, num_response_tokens double precision, num_labels double precision,
    times_sampled double precision, explore_step double precision, policy_step double precision, task_pass_rate double precision,
    task_attempts double precision)
LANGUAGE sql STABLE
AS $$
    SELECT i.item_id, i.priority, e.mean_reward, coalesce(e.std_reward, 0), e.min_reward, e.max_reward, e.num_experiences,
           e.num_response_tokens, e.num_labels, i.times, g.explore_step, e.policy_step, coalesce(s.alpha / (s.alpha + s.beta), 0.5),
           coalesce(s.attempts, 0)
    FROM unnest(of_items, of_priorities, of_times) AS i (item_id, priority, times)
    CROSS JOIN LATERAL (SELECT run_id, task_id, explore_step FROM rft.rollout_group WHERE group_id = i.item_id OFFSET 0) g
    JOIN rft.run r ON r.run_id = g.run_id
    LEFT JOIN rft.task_stat s ON s.run_id = g.run_id AND s.task_id = g.task_id
    LEFT JOIN LATERAL (
        SELECT avg(t.reward) AS mean_reward, stddev_pop(t.reward) AS std_reward, min(t.reward) AS min_reward, max(t.reward) AS max_reward,
               count(*)::double precision AS num_experiences, avg(x.num_response_tokens)::double precision AS num_response_tokens,
               sum(t.labels)::double precision AS num_labels, min(t.step)::double precision AS policy_step
        FROM rft.experience x
        CROSS JOIN LATERAL (
            SELECT (SELECT count(*) FROM rft.label l WHERE l.experience_id = x.experience_id) AS labels,
                   (SELECT p.trainer_step FROM rft.policy_version p WHERE p.policy_version_id = x.policy_version_min) AS step,
                   CASE WHEN x.reward_final THEN x.reward ELSE coalesce((
                       SELECT v.reward FROM rft.verdict v WHERE v.experience_id = x.experience_id AND v.pipeline_version = r.pipeline_version
                       ORDER BY v.verdict_id DESC LIMIT 1), x.reward) END AS reward) t
        WHERE x.group_id = i.item_id) e ON true
    WHERE g.run_id = of_run
$$;
COMMENT ON FUNCTION rft.formula_columns IS 'What a priority formula may use of a group. priority: as pipeline or trainer said; rewards: of its experiences, as they would be trained with now; num_response_tokens: mean; num_labels: relabels; policy_step: trainer step of the oldest policy, NULL where none sampled; task_pass_rate, task_attempts: what the run knows of its task.';

CREATE FUNCTION rft.formula_values(of_run bigint, of_items bigint[], of_priorities double precision[], of_times integer[])
RETURNS double precision[]
LANGUAGE plpgsql
AS $$
DECLARE
    formula CONSTANT text := (SELECT s.formula FROM rft.sampler s WHERE s.run_id = of_run);
    query text;
    found double precision[];
BEGIN
    IF formula IS NULL THEN
        RETURN of_priorities;
    END IF;
    -- Groups one after the other, each looked up by its key: a join of all of them with their columns could be planned as comparing
    -- each with each.
    query := format(
        'SELECT array_agg(v.value ORDER BY i.place) FROM unnest($2, $3, $4) WITH ORDINALITY AS i (item_id, priority, times, place)'
        ' LEFT JOIN LATERAL (SELECT (%s)::double precision AS value FROM rft.formula_columns($1, ARRAY[i.item_id], ARRAY[i.priority],'
        ' ARRAY[i.times])) v ON true', formula);
    BEGIN
        EXECUTE query INTO found USING of_run, of_items, of_priorities, of_times;
    EXCEPTION WHEN data_exception THEN
        -- A division by zero in one group must not stop those who write the others.
        IF cardinality(of_items) = 1 THEN
            RETURN ARRAY[0.0];
        END IF;
        FOR i IN 1 .. cardinality(of_items) LOOP
            found := found || rft.formula_values(of_run, of_items[i:i], of_priorities[i:i], of_times[i:i]);
        END LOOP;
    END;
    RETURN found;
END
$$;
COMMENT ON FUNCTION rft.formula_values IS 'The formula''s value for each group, in the order given; 0 where it cannot be computed (division by zero, overflow).';

CREATE FUNCTION rft.place_items(of_run bigint, of_items bigint[], of_values double precision[], of_times integer[])
RETURNS TABLE (
    nth integer, item_id bigint, sort_key bigint, lane text, draw_weight double precision, draw_key double precision, clock double precision,
    is_race boolean)
LANGUAGE sql STABLE
AS $$
    -- Once for all groups, and not for each of them.
    WITH state AS MATERIALIZED (
        SELECT * FROM rft.lane_state(of_run, (SELECT current_attempt_id FROM rft.run WHERE run_id = of_run)))
    -- OFFSET 0: each group is looked up by its key, whatever the planner thinks of the sizes of tables.
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
COMMENT ON FUNCTION rft.place_items IS 'Lane, weight and key of groups that come in now, given their formula''s value and how often each was drawn; nth counts them from 1.';

CREATE FUNCTION rft.ready_groups(of_groups bigint[], of_priorities double precision[]) RETURNS void
LANGUAGE plpgsql
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
        sealed_at = coalesce(g.sealed_at, clock_timestamp()), lease_until = NULL
    WHERE g.group_id = ANY (of_groups);

    SELECT array_agg(coalesce((
        SELECT w.times_sampled FROM rft.worklist w
        WHERE w.consumer = 'trainer/' || of_run AND w.item_kind = 'group' AND w.item_id = i.item_id), 0) ORDER BY i.place) INTO times
    FROM unnest(of_groups) WITH ORDINALITY AS i (item_id, place);
    weighed := rft.formula_values(of_run, of_groups, of_priorities, times);

    -- Its age is that of its oldest token, or of the step at which this history left that policy's; where no policy sampled one
    -- (demonstrations), it does not age.
    WITH written AS (
        INSERT INTO rft.worklist AS w (consumer, item_kind, item_id, sort_key, priority, lane, draw_weight, draw_key, policy_step)
        SELECT 'trainer/' || of_run, 'group', p.item_id, p.sort_key, of_priorities[p.nth], p.lane, p.draw_weight,
               CASE WHEN NOT p.is_race OR k.item_id IS NULL THEN p.draw_key
                    -- What is left of its way, at its new weight.
                    ELSE p.clock + greatest(k.draw_key - p.clock, 0) * k.draw_weight / p.draw_weight END,
               coalesce((SELECT min(least(v.trainer_step, h.last_step)) FROM rft.experience e
                         JOIN rft.policy_version v ON v.policy_version_id = e.policy_version_min
                         LEFT JOIN rft.attempt_history h ON h.history_id = u.current_attempt_id AND h.attempt_id = v.attempt_id
                         WHERE e.group_id = p.item_id), 2147483647)
        FROM rft.place_items(of_run, of_groups, weighed, times) p
        JOIN rft.run u ON u.run_id = of_run
        LEFT JOIN LATERAL (
            SELECT item_id, draw_key, draw_weight FROM rft.worklist
            WHERE consumer = 'trainer/' || of_run AND item_kind = 'group' AND item_id = p.item_id OFFSET 0) k ON true
        ON CONFLICT (consumer, item_kind, item_id) DO UPDATE
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
COMMENT ON FUNCTION rft.ready_groups IS 'Groups of one run whose verdicts kept something, with the pipeline''s priorities: they can be drawn now. The caller holds the run''s row, so that its policy does not change meanwhile.';

CREATE FUNCTION rft.sampler_policy(of_run bigint) RETURNS jsonb
LANGUAGE sql STABLE
AS $$
    SELECT (to_jsonb(s) - ARRAY['run_id', 'max_staleness', 'fresh_share', 'epoch', 'num_inserted']) || jsonb_build_object(
        'lanes', (SELECT jsonb_agg(to_jsonb(l) - 'run_id' ORDER BY l.place) FROM rft.sampler_lane l WHERE l.run_id = of_run))
    FROM rft.sampler s WHERE s.run_id = of_run
$$;
COMMENT ON FUNCTION rft.sampler_policy IS 'What decides on the places of groups and the counts of draws; NULL where the run has no policy yet.';

CREATE FUNCTION rft.set_sampler(of_run bigint, policy jsonb) RETURNS boolean
LANGUAGE plpgsql
AS $$
DECLARE
    before CONSTANT jsonb := rft.sampler_policy(of_run);
BEGIN
    INSERT INTO rft.sampler AS s (run_id, max_staleness, formula, samples_per_insert, min_size_to_sample, error_buffer, fresh_share)
    SELECT of_run, p.max_staleness, p.formula, p.samples_per_insert, p.min_size_to_sample, p.error_buffer, p.fresh_share
    FROM jsonb_populate_record(NULL::rft.sampler, policy) p
    ON CONFLICT (run_id) DO UPDATE
    SET max_staleness = excluded.max_staleness, formula = excluded.formula, samples_per_insert = excluded.samples_per_insert,
        min_size_to_sample = excluded.min_size_to_sample, error_buffer = excluded.error_buffer, fresh_share = excluded.fresh_share;
    DELETE FROM rft.sampler_lane WHERE run_id = of_run;
    INSERT INTO rft.sampler_lane
    SELECT (jsonb_populate_record(NULL::rft.sampler_lane, l.lane || jsonb_build_object('run_id', of_run, 'place', l.place))).*
    FROM jsonb_array_elements(policy -> 'lanes') WITH ORDINALITY AS l (lane, place);
    IF before IS NOT DISTINCT FROM rft.sampler_policy(of_run) THEN
        RETURN false;
    END IF;
    UPDATE rft.sampler SET epoch = epoch + 1 WHERE run_id = of_run;
    RETURN true;
END
$$;
COMMENT ON FUNCTION rft.set_sampler IS 'Sets a run''s policy; returns whether it is another one than before. Then rft.place_all is due, once rft.return_draws has said what was drawn. The caller holds the run''s row exclusively.';

CREATE FUNCTION rft.place_all(of_run bigint) RETURNS void
LANGUAGE plpgsql
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
        SELECT count(*) FROM rft.worklist w WHERE w.consumer = 'trainer/' || of_run AND w.available AND w.times_sampled = 0) END
    WHERE s.run_id = of_run;
    -- Locked in the order in which labels lock them.
    SELECT array_agg(l.item_id), array_agg(l.priority), array_agg(l.times_sampled) INTO items, priorities, times FROM (
        SELECT w.item_id, w.priority, w.times_sampled FROM rft.worklist w
        WHERE w.consumer = 'trainer/' || of_run AND w.item_kind = 'group' ORDER BY w.item_id FOR UPDATE) l;
    weighed := rft.formula_values(of_run, items, priorities, times);
    FOR p IN SELECT * FROM rft.place_items(of_run, items, weighed, times) LOOP
        UPDATE rft.worklist w SET lane = p.lane, draw_weight = p.draw_weight, draw_key = p.draw_key
        WHERE w.consumer = 'trainer/' || of_run AND w.item_kind = 'group' AND w.item_id = p.item_id
          AND (w.lane, w.draw_weight, w.draw_key) IS DISTINCT FROM (p.lane, p.draw_weight, p.draw_key);
    END LOOP;
END
$$;
COMMENT ON FUNCTION rft.place_all IS 'Under a new policy counts start anew, and every group gets its place in it.';

CREATE FUNCTION rft.set_priorities(of_run bigint, of_items bigint[], of_priorities double precision[]) RETURNS bigint
LANGUAGE plpgsql
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
            WHERE consumer = 'trainer/' || of_run AND item_kind = 'group' AND item_id = n.item_id FOR UPDATE) w) l;
    weighed := rft.formula_values(of_run, items, priorities, times);
    FOR p IN SELECT * FROM rft.place_items(of_run, items, weighed, times) LOOP
        UPDATE rft.worklist w
        SET priority = priorities[p.nth], draw_weight = p.draw_weight,
            draw_key = CASE WHEN p.is_race THEN p.clock + greatest(w.draw_key - p.clock, 0) * w.draw_weight / p.draw_weight ELSE w.draw_key END
        WHERE w.consumer = 'trainer/' || of_run AND w.item_kind = 'group' AND w.item_id = p.item_id;
    END LOOP;
    RETURN coalesce(cardinality(items), 0);
END
$$;
COMMENT ON FUNCTION rft.set_priorities IS 'New priorities of groups that wait, rest or were drawn; returns how many there are.';
