-- Known answers: mixed into queues to measure people, and decided where people disagree.

CREATE TYPE rft.gold_method AS ENUM ('known', 'adjudicated');
COMMENT ON TYPE rft.gold_method IS 'known: given by the person who set up the queue; adjudicated: decided on annotations that disagree.';

CREATE TABLE rft.gold (
    gold_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    kind text NOT NULL,
    target_id bigint NOT NULL,
    value jsonb NOT NULL,
    method rft.gold_method NOT NULL DEFAULT 'known',
    annotation_ids bigint[] NOT NULL DEFAULT '{}',
    author text NOT NULL DEFAULT coalesce(nullif(current_setting('rft.author', true), ''), session_user) CHECK (author <> ''),
    session_user_name text NOT NULL DEFAULT session_user,
    made_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX gold_target ON rft.gold (kind, target_id, gold_id);
COMMENT ON TABLE rft.gold IS 'Known answers; append-only, the newest of a kind and target counts. Has no free texts. Only accounts of rft_worker and the owner see it.';
COMMENT ON COLUMN rft.gold.gold_id IS 'Key.';
COMMENT ON COLUMN rft.gold.kind IS 'Kind of label; not of the types text and edit, which have no one right answer.';
COMMENT ON COLUMN rft.gold.target_id IS 'The target.';
COMMENT ON COLUMN rft.gold.value IS 'The right value, without notes.';
COMMENT ON COLUMN rft.gold.method IS 'Where it is from.';
COMMENT ON COLUMN rft.gold.annotation_ids IS 'The annotations on which it was decided.';
COMMENT ON COLUMN rft.gold.author IS 'Who decided.';
COMMENT ON COLUMN rft.gold.session_user_name IS 'The database account that stored it.';
COMMENT ON COLUMN rft.gold.made_at IS 'When it was stored.';

CREATE TABLE rft.gold_rate (
    kind text PRIMARY KEY,
    rate double precision NOT NULL CHECK (rate BETWEEN 0 AND 0.5)
);
COMMENT ON TABLE rft.gold_rate IS 'How often a queue hands out a target with a known answer. Only accounts of rft_worker and the owner see it.';
COMMENT ON COLUMN rft.gold_rate.kind IS 'Kind of label.';
COMMENT ON COLUMN rft.gold_rate.rate IS 'Share of claimed questions, from 0 to 0.5.';

ALTER TABLE rft.gold ENABLE ROW LEVEL SECURITY;
CREATE POLICY gold_read ON rft.gold FOR SELECT USING ((SELECT rft.may_judge()));
CREATE POLICY gold_write ON rft.gold FOR INSERT WITH CHECK (true);
ALTER TABLE rft.gold_rate ENABLE ROW LEVEL SECURITY;
CREATE POLICY gold_rate_all ON rft.gold_rate USING ((SELECT rft.may_judge()));
CREATE TRIGGER gold_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON rft.gold FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_fact_change();

ALTER TABLE rft.question ADD COLUMN is_gold boolean NOT NULL DEFAULT false;
COMMENT ON COLUMN rft.question.is_gold IS 'Whether its answer is known: it is handed out at the rate of its kind, to each account once, open or not.';
CREATE INDEX question_gold ON rft.question (queue, question_id) WHERE is_gold;

-- Owner's rights, since people may not read rft.gold: the count of its rows would tell them. It answers nothing to them. No setting is read.
CREATE FUNCTION rft.known_answers() RETURNS TABLE (kind text, target_id bigint, value jsonb)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT DISTINCT ON (g.kind, g.target_id) g.kind, g.target_id, g.value FROM rft.gold g WHERE (SELECT rft.may_judge())
    ORDER BY g.kind, g.target_id, g.gold_id DESC
$$;
COMMENT ON FUNCTION rft.known_answers() IS 'Returns the known answers that count, to accounts of rft_worker and the owner; no row to others. Owner''s rights, since others may not read rft.gold.';

CREATE FUNCTION rft.fill_gold() RETURNS trigger
LANGUAGE plpgsql
AS $$
DECLARE
    k rft.label_kind;
    problem text;
BEGIN
    SELECT v.* INTO k FROM rft.label_kind v WHERE v.kind = NEW.kind AND v.retired_at IS NULL ORDER BY v.version DESC LIMIT 1;
    problem := CASE
        WHEN k.kind IS NULL THEN 'there is no such kind of label, or it was retired'
        WHEN k.type IN ('text', 'edit') THEN format('the type %s has no one right answer', k.type)
        ELSE 'the value ' || rft.why_wrong_value(k.type, k.spec, NEW.value) END;
    NEW.value := CASE WHEN problem IS NULL THEN rft.without_texts(k.type, k.spec, NEW.value) ELSE NEW.value END;
    IF problem IS NOT NULL OR position('[purged]' IN NEW.value::text) > 0 THEN
        RAISE EXCEPTION 'gold of "%", target %: %', NEW.kind, NEW.target_id, coalesce(problem, 'only tags of the list can be a known answer')
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Correct it; nothing was stored.';
    END IF;
    NEW.session_user_name := session_user;
    NEW.made_at := clock_timestamp();
    INSERT INTO rft.question AS q (kind, target_id, is_gold, wanted) VALUES (NEW.kind, NEW.target_id, true, 0)
    ON CONFLICT (target_id, kind) WHERE review_id IS NULL DO UPDATE SET is_gold = true;
    RETURN NEW;
END
$$;
COMMENT ON FUNCTION rft.fill_gold() IS 'Trigger: checks a known answer and marks its question.';
CREATE TRIGGER gold_fill BEFORE INSERT ON rft.gold FOR EACH ROW EXECUTE FUNCTION rft.fill_gold();

CREATE FUNCTION rft.lease_gold(of_queue text, of_run bigint, not_ids bigint[], is_limited boolean) RETURNS integer
LANGUAGE plpgsql
AS $$
DECLARE
    chosen bigint;
BEGIN
    IF random() >= coalesce((SELECT rate FROM rft.gold_rate WHERE kind = of_queue), 0) THEN
        RETURN 0;
    END IF;
    SELECT q.question_id INTO chosen FROM rft.question q
    WHERE q.queue = of_queue AND q.is_gold AND q.deadline > rft.clock() AND q.question_id <> ALL (not_ids) AND (of_run IS NULL OR q.run_id = of_run)
      AND NOT EXISTS (SELECT FROM rft.assignment a WHERE a.question_id = q.question_id AND a.session_user_name = session_user
                      AND a.state IN ('answered', 'skipped'))
      AND rft.is_answerable(q, is_limited)
    ORDER BY random() LIMIT 1;
    IF chosen IS NULL THEN
        RETURN 0;
    END IF;
    INSERT INTO rft.assignment (question_id, session_user_name, state, leased_until)
    VALUES (chosen, session_user, 'leased', rft.clock() + rft.question_lease())
    ON CONFLICT (question_id, session_user_name) DO UPDATE SET state = 'leased', leased_until = excluded.leased_until, since = rft.clock();
    RETURN 1;
END
$$;
COMMENT ON FUNCTION rft.lease_gold(text, bigint, bigint[], boolean) IS 'Leases, at the rate of the kind, a question with a known answer that the session''s account has not answered; returns their number. Called by rft.claim_questions.';

CREATE FUNCTION rft.adjudicate(of_kind text, of_target bigint, of_value jsonb, why text DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql
AS $$
DECLARE
    said bigint[] := ARRAY(SELECT a.annotation_id FROM rft.v_annotation a
                           WHERE a.kind = of_kind AND a.target_id = of_target AND a.source IN ('human', 'import') ORDER BY 1);
    id bigint;
BEGIN
    INSERT INTO rft.annotation (kind, target_id, value, source, reason) VALUES (of_kind, of_target, of_value, 'adjudication', why) RETURNING annotation_id INTO id;
    IF (SELECT type NOT IN ('text', 'edit') FROM rft.v_label_kind WHERE kind = of_kind) THEN
        INSERT INTO rft.gold (kind, target_id, value, method, annotation_ids) VALUES (of_kind, of_target, of_value, 'adjudicated', said);
    END IF;
    RETURN id;
END
$$;
COMMENT ON FUNCTION rft.adjudicate(text, bigint, jsonb, text) IS 'Decides on annotations that disagree: stores an annotation of the source adjudication, and the value as gold. Needs the rights of rft_worker.';
