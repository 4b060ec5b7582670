-- How a run samples: its policy in lanes, and the draws from each. See docs/decisions/0014.

CREATE TYPE rft.sample_order AS ENUM ('fifo', 'newest', 'uniform', 'prioritized', 'rank');
COMMENT ON TYPE rft.sample_order IS 'fifo: the oldest first; newest: the newest first; uniform: all with the same probability; prioritized: with a probability in proportion to the weight; rank: in proportion to a power of the rank by priority.';

CREATE TABLE rft.sampler (
    run_id bigint PRIMARY KEY REFERENCES rft.run,
    max_staleness integer NOT NULL,
    formula text,
    samples_per_insert double precision CHECK (samples_per_insert > 0),
    min_size_to_sample integer NOT NULL,
    error_buffer double precision NOT NULL,
    fresh_share double precision NOT NULL,
    over_sampling double precision NOT NULL,
    epoch integer NOT NULL DEFAULT 0,
    num_inserted bigint NOT NULL DEFAULT 0
);
COMMENT ON TABLE rft.sampler IS 'How a run samples; written by each attempt when it starts.';
COMMENT ON COLUMN rft.sampler.run_id IS 'The run that samples by these settings.';
COMMENT ON COLUMN rft.sampler.max_staleness IS 'Groups whose oldest token is older than this many trainer steps are not drawn.';
COMMENT ON COLUMN rft.sampler.formula IS 'An expression over the columns of rft.formula_columns, as rft.checked_formula printed it, for every writer; NULL: the priority itself.';
COMMENT ON COLUMN rft.sampler.samples_per_insert IS 'Groups drawn per group that became ready; NULL: no limit.';
COMMENT ON COLUMN rft.sampler.min_size_to_sample IS 'Groups that must have become ready before the first draw, where the ratio is limited.';
COMMENT ON COLUMN rft.sampler.error_buffer IS 'Number of samples by which the ratio may be exceeded.';
COMMENT ON COLUMN rft.sampler.fresh_share IS 'New groups that explorers supply per group of a batch.';
COMMENT ON COLUMN rft.sampler.over_sampling IS 'Share of what explorers supply for a batch that they sample in addition; the trainer takes what is ready first, and the rest serves the next steps.';
COMMENT ON COLUMN rft.sampler.epoch IS 'Grows when the policy changes; counts of an earlier epoch are not continued.';
COMMENT ON COLUMN rft.sampler.num_inserted IS 'Groups that became ready in this epoch, without those in rft.sampler_insert; counted if the ratio is limited.';

CREATE TABLE rft.sampler_insert (
    run_id bigint NOT NULL,
    num_groups integer NOT NULL
);
CREATE INDEX sampler_insert_run ON rft.sampler_insert (run_id);
COMMENT ON TABLE rft.sampler_insert IS 'Groups that became ready since the last draw, a row per transaction so that writers do not wait for each other; the next draw adds them up.';
COMMENT ON COLUMN rft.sampler_insert.run_id IS 'The run whose groups became ready.';
COMMENT ON COLUMN rft.sampler_insert.num_groups IS 'Number of groups that one transaction made ready.';

CREATE TABLE rft.sampler_lane (
    run_id bigint NOT NULL REFERENCES rft.run,
    lane text NOT NULL CHECK (lane <> ''),
    place integer NOT NULL,
    source rft.experience_source,
    taskset text,
    replay boolean NOT NULL,
    ratio double precision NOT NULL CHECK (ratio > 0),
    sample_order rft.sample_order NOT NULL,
    max_times_sampled integer CHECK (max_times_sampled > 0),
    cooldown_steps integer NOT NULL CHECK (cooldown_steps BETWEEN 1 AND 1000000000),
    priority_exponent double precision NOT NULL,
    importance_exponent double precision NOT NULL,
    PRIMARY KEY (run_id, lane)
);
COMMENT ON TABLE rft.sampler_lane IS 'One queue of a run''s sampler: which groups it contains, in which order they are drawn, and its share of a batch.';
COMMENT ON COLUMN rft.sampler_lane.run_id IS 'The run whose sampler has this lane.';
COMMENT ON COLUMN rft.sampler_lane.lane IS 'Its name in the configuration.';
COMMENT ON COLUMN rft.sampler_lane.place IS 'Order of the lanes: a group is in the first lane that accepts it and has uses left.';
COMMENT ON COLUMN rft.sampler_lane.source IS 'The lane accepts groups of this source; NULL: any.';
COMMENT ON COLUMN rft.sampler_lane.taskset IS 'The lane accepts groups of this taskset; NULL: any.';
COMMENT ON COLUMN rft.sampler_lane.replay IS 'Whether it accepts groups that were drawn before and for which no other lane has uses left.';
COMMENT ON COLUMN rft.sampler_lane.ratio IS 'Its share of a batch is this divided by the sum of all lanes.';
COMMENT ON COLUMN rft.sampler_lane.sample_order IS 'The order in which its groups are drawn.';
COMMENT ON COLUMN rft.sampler_lane.max_times_sampled IS 'How often one group may be drawn in one history; NULL: no limit.';
COMMENT ON COLUMN rft.sampler_lane.cooldown_steps IS 'Minimum number of trainer steps between draws of a group.';
COMMENT ON COLUMN rft.sampler_lane.priority_exponent IS 'Weight = priority, or 1 / rank, to this power.';
COMMENT ON COLUMN rft.sampler_lane.importance_exponent IS 'Importance weight = (1 / probability) to this power, divided by the greatest of the batch.';

CREATE TABLE rft.sampler_step (
    attempt_id bigint NOT NULL REFERENCES rft.run_attempt,
    trainer_step integer NOT NULL,
    lane text NOT NULL,
    epoch integer NOT NULL,
    draw_number bigint NOT NULL,
    num_assigned bigint NOT NULL,
    num_drawn bigint NOT NULL,
    clock double precision NOT NULL,
    PRIMARY KEY (attempt_id, trainer_step, lane)
);
CREATE INDEX sampler_step_newest ON rft.sampler_step (attempt_id, draw_number);
COMMENT ON TABLE rft.sampler_step IS 'State of each lane after a step, append-only, so that going back to a checkpoint restores it. Only policies that need it write here.';
COMMENT ON COLUMN rft.sampler_step.attempt_id IS 'The attempt that drew.';
COMMENT ON COLUMN rft.sampler_step.trainer_step IS 'The step for which it drew.';
COMMENT ON COLUMN rft.sampler_step.lane IS 'The lane whose state it is.';
COMMENT ON COLUMN rft.sampler_step.epoch IS 'The epoch of the policy (rft.sampler) at the draw; counts of another epoch are not continued.';
COMMENT ON COLUMN rft.sampler_step.draw_number IS 'Grows with every draw of a history.';
COMMENT ON COLUMN rft.sampler_step.num_assigned IS 'Number of places of batches assigned to the lane by its ratio, up to this step.';
COMMENT ON COLUMN rft.sampler_step.num_drawn IS 'Number of groups drawn from it, up to this step.';
COMMENT ON COLUMN rft.sampler_step.clock IS 'Greatest draw_key drawn from it: the time of its race (uniform and prioritized).';

CREATE FUNCTION rft.sampler_policy(of_run bigint) RETURNS jsonb
LANGUAGE sql STABLE
AS $$
    SELECT (to_jsonb(s) - ARRAY['run_id', 'max_staleness', 'fresh_share', 'over_sampling', 'epoch', 'num_inserted']) || jsonb_build_object(
        'lanes', (SELECT jsonb_agg(to_jsonb(l) - 'run_id' ORDER BY l.place) FROM rft.sampler_lane l WHERE l.run_id = of_run))
    FROM rft.sampler s WHERE s.run_id = of_run
$$;
COMMENT ON FUNCTION rft.sampler_policy IS 'Returns the settings that determine the places of groups and the counts of draws; NULL if the run has no policy yet.';

CREATE FUNCTION rft.set_sampler(of_run bigint, policy jsonb) RETURNS boolean
LANGUAGE plpgsql
AS $$
DECLARE
    before CONSTANT jsonb := rft.sampler_policy(of_run);
BEGIN
    INSERT INTO rft.sampler AS s (run_id, max_staleness, formula, samples_per_insert, min_size_to_sample, error_buffer, fresh_share,
        over_sampling)
    SELECT of_run, p.max_staleness, p.formula, p.samples_per_insert, p.min_size_to_sample, p.error_buffer, p.fresh_share, p.over_sampling
    FROM jsonb_populate_record(NULL::rft.sampler, policy) p
    ON CONFLICT (run_id) DO UPDATE
    SET max_staleness = excluded.max_staleness, formula = excluded.formula, samples_per_insert = excluded.samples_per_insert,
        min_size_to_sample = excluded.min_size_to_sample, error_buffer = excluded.error_buffer, fresh_share = excluded.fresh_share,
        over_sampling = excluded.over_sampling;
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
COMMENT ON FUNCTION rft.set_sampler IS 'Sets a run''s policy; returns whether it changed. If so, call rft.place_all after rft.return_draws has determined what was drawn. The caller holds the run''s row exclusively.';

CREATE FUNCTION rft.lane_of(of_run bigint, of_source rft.experience_source, of_taskset text, times integer) RETURNS SETOF rft.sampler_lane
LANGUAGE sql STABLE
AS $$
    SELECT * FROM rft.sampler_lane l
    WHERE l.run_id = of_run AND (l.source IS NULL OR l.source = of_source) AND (l.taskset IS NULL OR l.taskset = of_taskset)
      AND (NOT l.replay OR times > 0)
    ORDER BY l.max_times_sampled IS NULL OR l.max_times_sampled > times DESC, l.replay, l.place LIMIT 1
$$;
COMMENT ON FUNCTION rft.lane_of IS 'Returns the lane of a group of a source and taskset that was drawn this many times: the first that accepts it and has uses left, replay last; if none has, the first. No row: no lane accepts it.';

CREATE FUNCTION rft.explorer_lanes(of_run bigint) RETURNS text[]
LANGUAGE sql STABLE
AS $$
    SELECT coalesce(array_agg(lane), '{}') FROM rft.sampler_lane
    WHERE run_id = of_run AND NOT replay AND coalesce(source = 'explorer', true)
$$;
COMMENT ON FUNCTION rft.explorer_lanes IS 'Returns the lanes that explorers supply, whose groups pacing counts.';

CREATE FUNCTION rft.is_paced(g rft.rollout_group) RETURNS boolean
LANGUAGE sql STABLE
AS $$
    SELECT NOT g.is_adopted OR EXISTS (
        SELECT FROM rft.task t CROSS JOIN LATERAL rft.lane_of(g.run_id, g.source, t.taskset, 0) l
        WHERE t.task_id = g.task_id AND l.lane = ANY (rft.explorer_lanes(g.run_id)))
$$;
COMMENT ON FUNCTION rft.is_paced IS 'Returns whether a group takes a place that explorers would fill: it was planned, or was added unplanned to a lane that they supply.';

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
COMMENT ON FUNCTION rft.lane_state IS 'Returns the state of the lanes after the newest draw of a history; no row before the first draw of the policy''s epoch.';
