-- What a person sets among a task's features stays, whatever its source and its task pipeline say later.

ALTER TABLE rft.task ADD COLUMN manual_features jsonb NOT NULL DEFAULT '{}';
COMMENT ON COLUMN rft.task.features IS 'Numbers and tags selectors may use (difficulty, length, …): those of the source, over them those of the task pipeline, over them those a person set. May be set by UPDATE.';
COMMENT ON COLUMN rft.task.source_features IS 'What the source gave, where features holds something else besides, or did; NULL where features is it.';
COMMENT ON COLUMN rft.task.manual_features IS 'What a person set by UPDATE of features; always wins. A name that is taken out of features by hand leaves it, and the source''s or the pipeline''s is seen again.';

-- Where a pipeline has added features, those of a person can be told from them; elsewhere they pass as the source's, as before.
UPDATE rft.task t SET manual_features = m.by_hand
FROM (
    SELECT t.task_id, jsonb_object_agg(f.key, f.value) AS by_hand
    FROM rft.task t
    LEFT JOIN rft.task_verdict v ON v.task_verdict_id = t.task_verdict_id
    CROSS JOIN LATERAL jsonb_each(CASE jsonb_typeof(t.features) WHEN 'object' THEN t.features ELSE '{}' END) f
    WHERE t.source_features IS NOT NULL AND (t.source_features || coalesce(v.features, '{}')) -> f.key IS DISTINCT FROM f.value
    GROUP BY t.task_id) m
WHERE t.task_id = m.task_id;

-- A change of features that comes with a verdict is the pipeline's, one that comes with other features of the source the loader's;
-- any other is a person's.
CREATE FUNCTION rft.keep_manual_features() RETURNS trigger
LANGUAGE plpgsql
AS $$
DECLARE
    given jsonb := coalesce(OLD.source_features, OLD.features);
BEGIN
    IF jsonb_typeof(NEW.features) <> 'object' OR jsonb_typeof(NEW.manual_features) <> 'object' THEN
        RAISE EXCEPTION 'features of task % are no object of names and values: %', OLD.task_id,
                CASE WHEN jsonb_typeof(NEW.features) <> 'object' THEN NEW.features ELSE NEW.manual_features END
            USING ERRCODE = 'check_violation',
                  HINT = 'Set one with: UPDATE rft.task SET features = features || ''{"level": 3}'' WHERE …';
    END IF;
    IF NEW.manual_features = OLD.manual_features THEN
        NEW.manual_features := (
            SELECT coalesce(jsonb_object_agg(f.key, f.value), '{}') FROM jsonb_each(NEW.features) f
            WHERE OLD.manual_features ? f.key OR f.value IS DISTINCT FROM OLD.features -> f.key);
    END IF;
    NEW.source_features := given;
    NEW.features := given
        || coalesce((SELECT v.features FROM rft.task_verdict v WHERE v.task_verdict_id = OLD.task_verdict_id), '{}')
        || NEW.manual_features;
    RETURN NEW;
END
$$;
COMMENT ON FUNCTION rft.keep_manual_features() IS 'Trigger: features that a person sets stay, over those of the source and of the task pipeline.';

CREATE TRIGGER task_manual_features
    BEFORE UPDATE OF features, manual_features ON rft.task FOR EACH ROW
    WHEN ((NEW.features, NEW.manual_features) IS DISTINCT FROM (OLD.features, OLD.manual_features)
          AND NEW.task_verdict_id IS NOT DISTINCT FROM OLD.task_verdict_id
          AND NEW.source_features IS NOT DISTINCT FROM OLD.source_features
          AND NEW.payload <> '{"purged": true}')
    EXECUTE FUNCTION rft.keep_manual_features();

CREATE OR REPLACE FUNCTION rft.forget_task() RETURNS trigger
LANGUAGE plpgsql
AS $$
BEGIN
    NEW.source_payload := NULL;
    NEW.source_features := NULL;
    NEW.manual_features := '{}';
    DELETE FROM rft.task_embedding WHERE task_id = NEW.task_id;
    DELETE FROM rft.task_score WHERE task_id = NEW.task_id;
    UPDATE rft.task_verdict SET features = '{}', prompt = NULL, answer = NULL, reason = CASE WHEN reason IS NOT NULL THEN '[purged]' END
    WHERE task_id = NEW.task_id;
    RETURN NEW;
END
$$;
COMMENT ON FUNCTION rft.forget_task() IS 'Trigger: with a task''s texts a purge removes its vectors, scores, what a person set and what verdicts quote.';
