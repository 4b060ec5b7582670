-- Drawing from the stored selections that runs train on.

-- md5 instead of PostgreSQL's own hashes, which may differ between versions and machines.
CREATE FUNCTION rft.selection_key(seed bigint, epoch integer, item_id bigint) RETURNS bigint
LANGUAGE sql IMMUTABLE
AS $$ SELECT epoch::bigint << 48 | ('x' || substr(md5(seed || ':' || epoch || ':' || item_id), 1, 12))::bit(48)::bigint $$;
COMMENT ON FUNCTION rft.selection_key(bigint, integer, bigint) IS 'Returns the place of an item in the order of a stored selection: one epoch after the other, each shuffled by seed and epoch.';

-- No nested loops: a queue that was just filled has no statistics, and a planner that assumes it to be empty would join it with itself
-- row by row.
CREATE FUNCTION rft.restore_selection(of_run bigint, of_attempt bigint) RETURNS void
LANGUAGE plpgsql SET enable_nestloop = off
AS $$
DECLARE
    queue CONSTANT text := 'trainer/' || of_run;
    r rft.run;
BEGIN
    SELECT * INTO r FROM rft.run WHERE run_id = of_run;
    WITH used AS (
        SELECT d.item_id, count(DISTINCT (d.attempt_id, d.trainer_step))::integer AS times
        FROM rft.v_history h
        JOIN rft.draw d ON d.attempt_id = h.attempt_id AND (h.last_step IS NULL OR d.trainer_step <= h.last_step)
        WHERE h.history_id = of_attempt
        GROUP BY d.item_id),
    due AS (
        SELECT w.item_id, coalesce(u.times, 0) < r.source_epochs AS available,
               rft.selection_key(r.seed, coalesce(u.times, 0), w.item_id) AS sort_key
        FROM rft.worklist w LEFT JOIN used u USING (item_id)
        WHERE w.consumer = queue AND w.item_kind = r.source_kind)
    UPDATE rft.worklist w SET available = d.available, sort_key = d.sort_key
    FROM due d
    WHERE w.consumer = queue AND w.item_kind = r.source_kind AND w.item_id = d.item_id
      AND (w.available, w.sort_key) IS DISTINCT FROM (d.available, d.sort_key);
END
$$;
COMMENT ON FUNCTION rft.restore_selection(bigint, bigint) IS 'Restores the items of a stored selection to the state of an attempt''s history: used as often as it drew them.';

-- The batch of a step follows from the seed, the epochs and the steps before it, so a history that goes back draws the same batches again.
-- A drawn item returns at once for the next epoch, behind all items that are still in this one.
CREATE FUNCTION rft.draw_selected(
    of_run bigint, of_attempt bigint, step integer, wanted integer, OUT outcome text, OUT reason text)
LANGUAGE plpgsql
AS $$
DECLARE
    queue CONSTANT text := 'trainer/' || of_run;
    r rft.run;
    found_items integer;
    picked bigint[];
BEGIN
    SELECT * INTO r FROM rft.run WHERE run_id = of_run AND current_attempt_id = of_attempt FOR SHARE;
    IF NOT FOUND THEN
        outcome := 'fenced';
        RETURN;
    END IF;
    outcome := 'drawn';
    SELECT count(DISTINCT item_id) INTO found_items FROM rft.draw WHERE attempt_id = of_attempt AND trainer_step = step;
    IF found_items = 0 THEN
        SELECT coalesce(array_agg(item_id ORDER BY sort_key, item_id), '{}') INTO picked FROM (
            SELECT item_id, sort_key FROM rft.worklist WHERE consumer = queue AND available AND item_kind = r.source_kind
            ORDER BY sort_key, item_id LIMIT wanted FOR UPDATE) p;
        UPDATE rft.worklist
        SET available = (sort_key >> 48) + 1 < r.source_epochs,
            sort_key = rft.selection_key(r.seed, (sort_key >> 48)::integer + 1, item_id)
        WHERE consumer = queue AND item_kind = r.source_kind AND item_id = ANY (picked);
        found_items := cardinality(picked);

        INSERT INTO rft.draw (attempt_id, trainer_step, slot, item_kind, item_id, experience_id, pair_id, reward_used, staleness)
        SELECT of_attempt, step, m.slot, r.source_kind, m.item_id, m.experience_id, m.pair_id,
               rft.reward_at(m.experience_id, r.label_cut), 0
        FROM (
            SELECT i.item_id, i.place - 1 AS slot, i.item_id AS experience_id, NULL::bigint AS pair_id
            FROM unnest(picked) WITH ORDINALITY AS i (item_id, place)
            WHERE r.source_kind = 'experience'
            UNION ALL
            SELECT i.item_id, 2 * (i.place - 1) + m.second, m.experience_id, p.pair_id
            FROM unnest(picked) WITH ORDINALITY AS i (item_id, place)
            JOIN rft.preference_pair p ON p.pair_id = i.item_id
            CROSS JOIN LATERAL (VALUES (0, p.chosen_id), (1, p.rejected_id)) AS m (second, experience_id)
            WHERE r.source_kind = 'pair') m
        ORDER BY m.slot;
    END IF;
    IF found_items < wanted THEN
        reason := format('%s of %s: the stored selection has no more', found_items, wanted);
    END IF;
END
$$;
COMMENT ON FUNCTION rft.draw_selected IS 'Draws the next experiences or whole pairs of a stored selection for a trainer step; a pair takes two slots, the chosen one first. outcome: drawn (reason: why a batch is short) or fenced (the attempt no longer holds the run).';
