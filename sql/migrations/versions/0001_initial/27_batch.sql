-- Batches. rft.draw_groups calls the parts of a draw in order; each part is a separate function, which only runs within it, under its planner
-- settings (docs/decisions/0021).

CREATE TABLE rft.batch (
    attempt_id bigint NOT NULL REFERENCES rft.run_attempt,
    trainer_step integer NOT NULL CHECK (trainer_step > 0),
    num_items integer NOT NULL CHECK (num_items >= 0),
    reason text,
    drawn_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (attempt_id, trainer_step)
);
COMMENT ON TABLE rft.batch IS 'What an attempt drew for a step, so that every process of the step gets the same, an empty batch included. Released with its draws.';
COMMENT ON COLUMN rft.batch.attempt_id IS 'The attempt that drew.';
COMMENT ON COLUMN rft.batch.trainer_step IS 'The step it was drawn for, from 1.';
COMMENT ON COLUMN rft.batch.num_items IS 'Number of drawn groups, or of items of a stored selection.';
COMMENT ON COLUMN rft.batch.reason IS 'Why the batch is short; NULL for a full one.';
COMMENT ON COLUMN rft.batch.drawn_at IS 'When it was drawn: before the step begins, or during the step before it.';

-- OFFSET 0: items are looked up by their keys, whatever length of the queue the planner assumes.
CREATE FUNCTION rft.record_draws(of_run bigint, of_attempt bigint, step integer, picked rft.pick[], reuses boolean) RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    version CONSTANT text := (SELECT pipeline_version FROM rft.run WHERE run_id = of_run);
BEGIN
    WITH item AS (
        SELECT p.place, w.item_id, w.policy_step, w.draw_key,
               CASE n.sample_order
               WHEN 'prioritized' THEN power(min(w.draw_weight) OVER (PARTITION BY p.lane) / w.draw_weight, n.importance_exponent)
               WHEN 'rank' THEN power(min(p.weight) OVER (PARTITION BY p.lane) / p.weight, n.importance_exponent) END AS importance
        FROM unnest(picked) WITH ORDINALITY AS p (lane, item_id, weight, place)
        CROSS JOIN LATERAL (
            SELECT * FROM rft.worklist WHERE run_id = of_run AND consumer = 'trainer' AND item_kind = 'group' AND item_id = p.item_id OFFSET 0) w
        JOIN rft.sampler_lane n ON n.run_id = of_run AND n.lane = p.lane)
    INSERT INTO rft.draw (attempt_id, trainer_step, slot, item_kind, item_id, experience_id, reward_used, staleness,
        importance_weight, draw_key, times_sampled)
    SELECT of_attempt, step, row_number() OVER (ORDER BY p.place, o.rollout_index, e.turn_index) - 1, 'group', p.item_id,
           e.experience_id, CASE WHEN e.reward_final THEN e.reward ELSE coalesce(v.reward, e.reward) END,
           CASE WHEN p.policy_step = 2147483647 THEN 0 ELSE step - 1 - p.policy_step END, p.importance,
           CASE WHEN reuses THEN p.draw_key END, CASE WHEN NOT reuses THEN 1 END
    FROM item p
    JOIN rft.experience e ON e.group_id = p.item_id
    JOIN rft.rollout o USING (rollout_id)
    LEFT JOIN rft.verdict v ON v.experience_id = e.experience_id AND v.newest_of = version
    WHERE coalesce(v.kept, version = 'none');
    IF reuses THEN
        PERFORM rft.count_uses(of_run, ARRAY(SELECT p.item_id FROM unnest(picked) p));
    END IF;
END
$$;
COMMENT ON FUNCTION rft.record_draws IS 'Records every experience of the picked groups as drawn for a step, with its current reward and its importance weight.';

CREATE FUNCTION rft.record_lanes(of_run bigint, of_attempt bigint, step integer, shares rft.lane_share[], picked rft.pick[]) RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
    INSERT INTO rft.sampler_step (attempt_id, trainer_step, lane, epoch, draw_number, num_assigned, num_drawn, clock)
    SELECT of_attempt, step, s.lane, m.epoch, coalesce((SELECT max(draw_number) FROM rft.lane_state(of_run, of_attempt)), 0) + 1,
           coalesce(y.num_assigned, 0) + s.places, coalesce(y.num_drawn, 0) + p.num_drawn,
           greatest(coalesce(y.clock, 0), CASE WHEN n.sample_order IN ('uniform', 'prioritized') THEN p.clock END)
    FROM unnest(shares) s
    JOIN rft.sampler_lane n ON n.run_id = of_run AND n.lane = s.lane
    JOIN rft.sampler m ON m.run_id = of_run
    LEFT JOIN rft.lane_state(of_run, of_attempt) y ON y.lane = s.lane
    CROSS JOIN LATERAL (
        SELECT count(*) AS num_drawn, max(w.draw_key) AS clock FROM unnest(picked) p
        CROSS JOIN LATERAL (
            SELECT draw_key FROM rft.worklist
            WHERE run_id = of_run AND consumer = 'trainer' AND item_kind = 'group' AND item_id = p.item_id OFFSET 0) w
        WHERE p.lane = s.lane) p;
END
$$;
COMMENT ON FUNCTION rft.record_lanes IS 'Records the state of each lane after a draw.';

-- The statements of one draw in one round trip. Locks: the run's row in share mode (a take-over waits for this transaction), the run's
-- draws (two readers take turns, so that a step is drawn once and shares are exact), then groups that age out, then the picked worklist
-- items. Items that a relabel has locked are skipped.
CREATE FUNCTION rft.draw_groups(
    of_run bigint, of_attempt bigint, step integer, wanted integer, refill_limit integer, ahead boolean DEFAULT false, OUT outcome text,
    OUT reason text)
LANGUAGE plpgsql SET enable_seqscan = off SET enable_material = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    s record;                       -- the run's policy
    before rft.batch;
    allowed integer := wanted;
    shares rft.lane_share[];
    picked rft.pick[];
BEGIN
    PERFORM FROM rft.run WHERE run_id = of_run AND current_attempt_id = of_attempt FOR SHARE;
    IF NOT FOUND THEN
        outcome := 'fenced';
        RETURN;
    END IF;
    PERFORM rft.take_lock('draw', of_run);
    outcome := 'drawn';
    SELECT * INTO before FROM rft.batch b WHERE b.attempt_id = of_attempt AND b.trainer_step = step;
    IF FOUND THEN
        reason := before.reason;
        RETURN;
    END IF;

    SELECT p.max_staleness, step - 1 - p.max_staleness AS oldest, p.samples_per_insert IS NOT NULL AS is_limited, n.reuses, n.is_fifo,
           p.samples_per_insert IS NOT NULL OR n.num_lanes > 1 OR n.has_race AS keeps_state
    INTO s FROM rft.sampler p
    CROSS JOIN LATERAL (
        SELECT count(*) AS num_lanes, bool_or(max_times_sampled IS NULL OR max_times_sampled > 1) AS reuses,
               bool_or(sample_order IN ('uniform', 'prioritized')) AS has_race, bool_and(sample_order = 'fifo') AS is_fifo
        FROM rft.sampler_lane WHERE run_id = of_run) n
    WHERE p.run_id = of_run;
    IF s.reuses THEN
        PERFORM rft.wake_items(of_run, step);
    END IF;
    -- Ahead of time a replacement would be sampled under the same old policy, and be too old again.
    IF NOT ahead THEN
        PERFORM rft.age_out(of_run, step, s.max_staleness);
    END IF;

    IF s.is_limited THEN
        allowed := rft.num_allowed(of_run, of_attempt, wanted);
    END IF;
    shares := rft.lane_shares(of_run, of_attempt, allowed);
    picked := rft.pick_from_lanes(of_run, step, s.oldest, step::bigint << 32, shares, allowed, '{}');
    IF cardinality(picked) < wanted THEN
        -- Before its time nothing is decided about a step that lacks groups: neither what may still come, nor which others take the places.
        IF ahead THEN
            outcome := 'not yet';
            RETURN;
        END IF;
        SELECT b.picked, b.outcome, b.reason INTO picked, outcome, reason
        FROM rft.complete_batch(of_run, step, s.oldest, wanted, refill_limit, shares, allowed, picked) b;
        IF outcome <> 'drawn' THEN
            RETURN;
        END IF;
    END IF;

    IF s.is_fifo AND cardinality(picked) = wanted AND rft.is_last_chance(of_run, step, s.oldest) THEN
        outcome := 'not yet';
        RETURN;
    END IF;

    INSERT INTO rft.batch (attempt_id, trainer_step, num_items, reason) VALUES (of_attempt, step, cardinality(picked), draw_groups.reason);
    PERFORM rft.record_draws(of_run, of_attempt, step, picked, s.reuses);
    IF s.keeps_state AND cardinality(picked) > 0 THEN
        PERFORM rft.record_lanes(of_run, of_attempt, step, shares, picked);
    END IF;
    IF s.reuses THEN
        PERFORM rft.rest_items(of_run, step, picked);
    ELSE
        -- By their places, which stay while the items are locked: for item_id = ANY (…), PostgreSQL before 17 may read the whole queue.
        UPDATE rft.worklist w SET available = false, times_sampled = w.times_sampled + 1
        WHERE w.ctid = ANY (ARRAY(
            SELECT x.place FROM unnest(picked) p
            CROSS JOIN LATERAL (
                SELECT ctid AS place FROM rft.worklist
                WHERE run_id = of_run AND consumer = 'trainer' AND item_kind = 'group' AND item_id = p.item_id OFFSET 0) x));
    END IF;
END
$$;
COMMENT ON FUNCTION rft.draw_groups IS 'Draws whole ready groups for a trainer step by the run''s policy. outcome: drawn (reason: why a batch is short), not yet (reason: the reviews, if nothing else is waited for), or fenced (the attempt no longer holds the run). ahead: the step before it is still being trained; only a full batch is drawn.';
