-- Draws record the rewards of turns that they used, where these were corrected.

ALTER TABLE rft.draw ADD COLUMN turn_rewards_used double precision[];
COMMENT ON COLUMN rft.draw.turn_rewards_used IS 'The rewards of its turns at the time of the draw, in the order of the turns. NULL: those that were sampled, or none; so before schema 0003.';

-- A selection asks this of every experience, and nearly none was corrected: that is two look-ups. PostgreSQL 18 would plan them anew in every call.
CREATE FUNCTION rft.turn_rewards_at(of_experience bigint, cut bigint) RETURNS double precision[]
LANGUAGE sql STABLE SET plan_cache_mode = force_generic_plan
AS $$
    SELECT CASE WHEN
        EXISTS (SELECT FROM rft.turn_reward c WHERE c.experience_id = of_experience AND c.reward <> c.reward_sampled)
        OR EXISTS (SELECT FROM rft.label c WHERE c.experience_id = of_experience AND c.turn IS NOT NULL AND c.label_id > cut)
    THEN (
        SELECT CASE WHEN bool_or(r.reward <> r.reward_sampled) THEN array_agg(r.reward ORDER BY r.turn) END
        FROM (
            SELECT t.turn, t.reward_sampled, coalesce((
                SELECT l.old_value FROM rft.label l
                WHERE l.experience_id = t.experience_id AND l.turn = t.turn AND l.label_id > cut
                ORDER BY l.label_id LIMIT 1), t.reward) AS reward
            FROM rft.turn_reward t WHERE t.experience_id = of_experience) r)
    END
$$;
COMMENT ON FUNCTION rft.turn_rewards_at(bigint, bigint) IS 'Returns the rewards of the turns of an experience without the labels after the cut, or the current ones if the cut is NULL; NULL if they are those that were sampled.';

-- In the statement itself, not by the function: it is called for every experience of a batch, and nearly none was corrected.
CREATE OR REPLACE FUNCTION rft.record_draws(of_run bigint, of_attempt bigint, step integer, picked rft.pick[], reuses boolean) RETURNS void
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
    INSERT INTO rft.draw (attempt_id, trainer_step, slot, item_kind, item_id, experience_id, reward_used, turn_rewards_used, staleness,
        importance_weight, draw_key, times_sampled)
    SELECT of_attempt, step, row_number() OVER (ORDER BY p.place, o.rollout_index, e.turn_index) - 1, 'group', p.item_id,
           e.experience_id, CASE WHEN e.reward_final THEN e.reward ELSE coalesce(v.reward, e.reward) END,
           CASE WHEN EXISTS (SELECT FROM rft.turn_reward t WHERE t.experience_id = e.experience_id AND t.reward <> t.reward_sampled)
                THEN ARRAY(SELECT t.reward FROM rft.turn_reward t WHERE t.experience_id = e.experience_id ORDER BY t.turn) END,
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

CREATE OR REPLACE FUNCTION rft.draw_selected(
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

    INSERT INTO rft.draw (attempt_id, trainer_step, slot, item_kind, item_id, experience_id, pair_id, reward_used, turn_rewards_used,
        staleness, importance_weight)
    SELECT of_attempt, step, row_number() OVER (ORDER BY i.place, m.place, m.experience_id) - 1, r.source_kind, i.item_id, m.experience_id,
           m.pair_id, rft.reward_at(m.experience_id, r.label_cut), rft.turn_rewards_at(m.experience_id, r.label_cut), 0, i.importance
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
