-- Drawing from the stored selections that runs train on. The queue of a selection is `selection/RUN`. Beside the selected groups it holds, in the lane
-- `left out`, those of their experiences that a chain had dropped when the selection was made: a later verdict changes no batch.

-- Each item has a random time in every interval of the length 1 / weight, and a draw takes the least times. So items are drawn in proportion to
-- their weights, and with equal weights each once in an epoch. md5 instead of PostgreSQL's own hashes, which may differ between versions
-- and machines.
CREATE FUNCTION rft.selection_time(seed bigint, times_sampled integer, item_id bigint, weight double precision) RETURNS double precision
LANGUAGE sql IMMUTABLE
AS $$
    SELECT (times_sampled + ('x' || substr(md5(seed || ':' || times_sampled || ':' || item_id), 1, 12))::bit(48)::bigint / 281474976710656.0::float8)
           / weight
$$;
COMMENT ON FUNCTION rft.selection_time IS 'Returns the place of an item in the order of a stored selection, given its number of draws; the least is drawn first.';

-- No nested loops: a queue that was just filled has no statistics, and a planner that assumes it to be empty would join it with itself
-- row by row.
CREATE FUNCTION rft.restore_selection(of_run bigint, of_attempt bigint) RETURNS void
LANGUAGE plpgsql SET enable_nestloop = off
AS $$
DECLARE
    r rft.run;
BEGIN
    SELECT * INTO r FROM rft.run WHERE run_id = of_run;
    WITH used AS (
        SELECT d.item_id, count(DISTINCT (d.attempt_id, d.trainer_step))::integer AS times
        FROM rft.v_attempt_history h
        JOIN rft.draw d ON d.attempt_id = h.attempt_id AND (h.last_step IS NULL OR d.trainer_step <= h.last_step)
        WHERE h.history_id = of_attempt
        GROUP BY d.item_id),
    due AS (
        SELECT w.item_id, t.times, r.source_weighted OR t.times < r.source_epochs AS available
        FROM rft.worklist w LEFT JOIN used u USING (item_id) CROSS JOIN LATERAL (SELECT coalesce(u.times, 0) AS times) t
        WHERE w.run_id = of_run AND w.consumer = 'selection' AND w.item_kind = r.source_kind)
    UPDATE rft.worklist w SET available = d.available, times_sampled = d.times,
        draw_key = rft.selection_time(r.seed, d.times, d.item_id, w.draw_weight)
    FROM due d
    WHERE w.run_id = of_run AND w.consumer = 'selection' AND w.item_kind = r.source_kind AND w.item_id = d.item_id
      AND (w.available, w.times_sampled) IS DISTINCT FROM (d.available, d.times);
END
$$;
COMMENT ON FUNCTION rft.restore_selection(bigint, bigint) IS 'Restores the items of a stored selection to the state of an attempt''s history: used as often as it drew them.';

CREATE FUNCTION rft.selected_experiences(kind rft.item_kind, of_item bigint)
RETURNS TABLE (experience_id bigint, place bigint, pair_id bigint)
LANGUAGE sql STABLE
AS $$
    SELECT of_item, 0::bigint, NULL::bigint WHERE kind = 'experience'
    UNION ALL
    SELECT m.experience_id, m.place, p.pair_id FROM rft.preference_pair p
    CROSS JOIN LATERAL (VALUES (p.chosen_id, 0::bigint), (p.rejected_id, 1::bigint)) AS m (experience_id, place)
    WHERE kind = 'pair' AND p.pair_id = of_item
    UNION ALL
    SELECT e.experience_id, o.rollout_index::bigint << 32 | e.turn_index, NULL FROM rft.experience e JOIN rft.rollout o USING (rollout_id)
    WHERE kind = 'group' AND e.group_id = of_item
$$;
COMMENT ON FUNCTION rft.selected_experiences IS 'Returns the experiences of an item of a stored selection, with their order within it: of a pair the chosen one first, of a group all, by rollout and turn.';

CREATE FUNCTION rft.pick_selected(r rft.run, step integer, wanted integer) RETURNS bigint[]
LANGUAGE plpgsql
AS $$
DECLARE
    -- With weights no item is ever used up. The run ends after as many draws as it would have without weights.
    num_left CONSTANT bigint := CASE WHEN r.source_weighted
        THEN greatest(0, r.source_rows * r.source_epochs - (step - 1) * least(wanted, r.source_rows)) ELSE wanted END;
    picked bigint[];
BEGIN
    SELECT coalesce(array_agg(item_id ORDER BY draw_key, item_id), '{}') INTO picked FROM (
        SELECT item_id, draw_key FROM rft.worklist
        WHERE run_id = r.run_id AND consumer = 'selection' AND lane = '' AND available AND item_kind = r.source_kind
        ORDER BY draw_key, item_id LIMIT least(wanted, num_left) FOR UPDATE) p;
    UPDATE rft.worklist
    SET available = r.source_weighted OR times_sampled + 1 < r.source_epochs,
        times_sampled = times_sampled + 1,
        draw_key = rft.selection_time(r.seed, times_sampled + 1, item_id, draw_weight)
    WHERE run_id = r.run_id AND consumer = 'selection' AND item_kind = r.source_kind AND item_id = ANY (picked);
    RETURN picked;
END
$$;
COMMENT ON FUNCTION rft.pick_selected IS 'Takes the next items of a stored selection, each for its next use, and returns them in order.';

-- The batch of a step follows from the seed, the epochs, the weights and the steps before it, so a history that goes back draws the same
-- batches again. A drawn item returns at once for its next use: without weights behind all items that are still in this epoch.
CREATE FUNCTION rft.draw_selected(
    of_run bigint, of_attempt bigint, step integer, wanted integer, OUT outcome text, OUT reason text)
LANGUAGE plpgsql
AS $$
DECLARE
    r rft.run;
    before rft.batch;
    picked bigint[];
    beta double precision;
BEGIN
    SELECT * INTO r FROM rft.run WHERE run_id = of_run AND current_attempt_id = of_attempt FOR SHARE;
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
    picked := rft.pick_selected(r, step, wanted);
    beta := (SELECT max(importance_exponent) FROM rft.sampler_lane WHERE run_id = of_run);

    INSERT INTO rft.draw (attempt_id, trainer_step, slot, item_kind, item_id, experience_id, pair_id, reward_used, staleness,
        importance_weight)
    SELECT of_attempt, step, row_number() OVER (ORDER BY i.place, m.place, m.experience_id) - 1, r.source_kind, i.item_id, m.experience_id,
           m.pair_id, rft.reward_at(m.experience_id, r.label_cut), 0, i.importance
    FROM (
        SELECT p.item_id, p.place,
               CASE WHEN r.source_weighted THEN power(min(w.draw_weight) OVER () / w.draw_weight, beta) END AS importance
        FROM unnest(picked) WITH ORDINALITY AS p (item_id, place)
        CROSS JOIN LATERAL (
            SELECT draw_weight FROM rft.worklist
            WHERE run_id = of_run AND consumer = 'selection' AND item_kind = r.source_kind AND item_id = p.item_id OFFSET 0) w) i
    CROSS JOIN LATERAL rft.selected_experiences(r.source_kind, i.item_id) m
    WHERE NOT EXISTS (
        SELECT FROM rft.worklist l
        WHERE l.run_id = of_run AND l.consumer = 'selection' AND l.item_kind = 'experience' AND l.item_id = m.experience_id AND l.lane = 'left out');
    IF cardinality(picked) < wanted THEN
        reason := format('%s of %s: the stored selection has no more', cardinality(picked), wanted);
    END IF;
    INSERT INTO rft.batch (attempt_id, trainer_step, num_items, reason) VALUES (of_attempt, step, cardinality(picked), draw_selected.reason);
END
$$;
COMMENT ON FUNCTION rft.draw_selected IS 'Draws the next experiences, whole pairs or whole groups of a stored selection for a trainer step; a pair takes two slots, the chosen one first. outcome: drawn (reason: why a batch is short) or fenced (the attempt no longer holds the run).';
