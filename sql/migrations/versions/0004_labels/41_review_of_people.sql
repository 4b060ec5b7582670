-- Reviews that several people answer: a review with a kind is answered by annotations of that kind, and a rule decides from them.

CREATE TYPE rft.answer_rule AS ENUM ('majority', 'mean', 'all', 'adjudicated');
COMMENT ON TYPE rft.answer_rule IS 'majority: pass if more than half pass, drop if fewer than half do, else the answer of the deadline; mean: pass if the mean is at least the limit; all: pass if all pass; adjudicated: what all say, else what an adjudication says.';

ALTER TABLE rft.review
    ADD COLUMN kind text,
    ADD COLUMN wanted integer NOT NULL DEFAULT 1 CHECK (wanted BETWEEN 1 AND 100),
    ADD COLUMN rule rft.answer_rule,
    ADD COLUMN least double precision,
    ADD COLUMN passing text[],
    ADD COLUMN reward_label_id bigint,
    ADD CHECK (kind IS NOT NULL OR wanted = 1);
COMMENT ON COLUMN rft.review.kind IS 'Kind of label (bool, number or choice, about an experience) whose annotations answer it; NULL: answered by UPDATE or by a reward.';
COMMENT ON COLUMN rft.review.wanted IS 'How many accounts must annotate before the rule decides; 1 without a kind.';
COMMENT ON COLUMN rft.review.rule IS 'How the answer follows from the annotations; NULL without a kind. An adjudication decides alone.';
COMMENT ON COLUMN rft.review.least IS 'An annotation passes if its number is at least this; true is 1, false is 0.';
COMMENT ON COLUMN rft.review.passing IS 'Choices that pass; NULL for numbers and bool.';

COMMENT ON COLUMN rft.review.reward_label_id IS 'The label whose reward was the answer, which is undone with it; NULL if there is no answer, or another one.';

-- Answers of before: the label that was stored in the transaction of the answer, by its account. A restored backup has its rows from one transaction, so
-- the two are also compared by the clock.
ALTER TABLE rft.review DISABLE TRIGGER USER;
UPDATE rft.review w SET reward_label_id = l.label_id
FROM (SELECT r.review_id, max(n.label_id) AS label_id
      FROM rft.review r JOIN rft.label n USING (experience_id)
      WHERE r.answer = 'pass' AND n.label_id < r.answer_id AND n.xmin = r.xmin AND n.session_user_name = r.session_user_name
        AND n.labelled_at BETWEEN r.answered_at - interval '1 min' AND r.answered_at
      GROUP BY r.review_id) l
WHERE w.review_id = l.review_id;
ALTER TABLE rft.review ENABLE TRIGGER USER;

-- What people say counts once per account: their newest annotation that stands.
CREATE FUNCTION rft.review_decision(w rft.review) RETURNS rft.review_answer
LANGUAGE sql STABLE
    SET enable_seqscan = off
AS $$
    WITH standing AS MATERIALIZED (
        SELECT DISTINCT ON (a.source, a.session_user_name) a.source, a.num, CASE WHEN w.passing IS NULL THEN a.num >= w.least ELSE a.choice = ANY (w.passing) END AS passes, a.annotation_id
        FROM rft.annotation a
        WHERE a.target_id = w.experience_id AND a.kind = w.kind AND a.source IN ('human', 'adjudication') AND NOT a.retracted
          AND NOT EXISTS (SELECT FROM rft.annotation s WHERE s.supersedes = a.annotation_id)
        ORDER BY a.source, a.session_user_name, a.annotation_id DESC),
    said AS (SELECT count(*) AS n, count(*) FILTER (WHERE passes) AS passing, avg(num) AS mean FROM standing WHERE source = 'human')
    SELECT coalesce(
        (SELECT CASE WHEN passes THEN 'pass' ELSE 'drop' END FROM standing WHERE source = 'adjudication' ORDER BY annotation_id DESC LIMIT 1),
        (SELECT CASE
            WHEN n < w.wanted THEN NULL
            WHEN w.rule = 'majority' THEN CASE WHEN 2 * passing > n THEN 'pass' WHEN 2 * passing < n THEN 'drop' ELSE w.otherwise::text END
            WHEN w.rule = 'mean' THEN CASE WHEN mean >= w.least THEN 'pass' ELSE 'drop' END
            WHEN w.rule = 'all' THEN CASE WHEN passing = n THEN 'pass' ELSE 'drop' END
            WHEN passing = n THEN 'pass' WHEN passing = 0 THEN 'drop' END
         FROM said))::rft.review_answer
$$;
COMMENT ON FUNCTION rft.review_decision(rft.review) IS 'Returns the answer that follows from the annotations of a review with a kind; NULL while too few stand, or while an adjudication is missing.';

CREATE FUNCTION rft.why_wrong_panel(of_kind text, of_rule rft.answer_rule, of_passing text[]) RETURNS text
LANGUAGE sql STABLE
AS $$
    SELECT CASE
        WHEN k.kind IS NULL THEN 'does not exist or was retired'
        WHEN k.target <> 'experience' THEN format('is about a %s; a review needs one about an experience', k.target)
        WHEN k.type NOT IN ('bool', 'number', 'choice') THEN format('is of the type %s; a review needs bool, number or choice', k.type)
        WHEN k.type = 'choice' AND (of_passing IS NULL OR of_rule = 'mean') THEN 'is of the type choice: name the choices that pass, and another rule than mean'
        WHEN k.type = 'choice' AND NOT (k.spec -> 'choices') ?& of_passing THEN format('has the choices %s; those that pass must be among them', k.spec ->> 'choices') END
    FROM (SELECT) one LEFT JOIN rft.v_label_kind k ON k.kind = of_kind
$$;
COMMENT ON FUNCTION rft.why_wrong_panel(text, rft.answer_rule, text[]) IS 'Returns why annotations of a kind cannot answer a review, as the end of the sentence "the kind of label …"; NULL if they can.';

CREATE FUNCTION rft.check_review() RETURNS trigger
LANGUAGE plpgsql
AS $$
DECLARE
    k rft.label_kind;
    problem text;
BEGIN
    IF NEW.kind IS NULL OR NEW.answer IS NOT NULL OR NEW.deadline <= rft.clock() THEN  -- a decided one is copied by a fork
        RETURN NEW;
    END IF;
    SELECT v.* INTO k FROM rft.label_kind v WHERE v.kind = NEW.kind AND v.retired_at IS NULL ORDER BY v.version DESC LIMIT 1;
    problem := rft.why_wrong_panel(NEW.kind, NEW.rule, NEW.passing);
    IF problem IS NOT NULL THEN
        RAISE EXCEPTION 'review "%": the kind of label "%" %', NEW.name, NEW.kind, problem
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Correct the stage human_review, or define the kind: rft label kind define.';
    END IF;
    NEW.rule := coalesce(NEW.rule, 'majority');
    IF k.type = 'choice' THEN
        NEW.least := NULL;
    ELSE
        NEW.least := coalesce(NEW.least, 0.5);
        NEW.passing := NULL;
    END IF;
    -- People may have annotated before. The pipeline that asks has locked the group.
    NEW.answer := rft.review_decision(NEW);
    IF NEW.answer IS NOT NULL THEN
        NEW.answer_id := nextval('rft.label_label_id_seq');
        NEW.author := coalesce(nullif(current_setting('rft.author', true), ''), session_user);
        NEW.session_user_name := session_user;
        NEW.answered_at := rft.clock();
    END IF;
    RETURN NEW;
END
$$;
COMMENT ON FUNCTION rft.check_review() IS 'Trigger: checks the kind of a review, and answers it if enough annotations stand already.';
CREATE TRIGGER review_check BEFORE INSERT ON rft.review FOR EACH ROW EXECUTE FUNCTION rft.check_review();

-- As before. A review with a kind is answered by annotations alone; rft.settle_questions answers it from its trigger. The depth is not enough to know
-- our triggers: a trigger of an account's temporary table has the same. Ours run with the owner's rights.
CREATE OR REPLACE FUNCTION rft.record_answer() RETURNS trigger
LANGUAGE plpgsql
AS $$
DECLARE
    is_owner boolean := pg_has_role(current_user, (SELECT relowner FROM pg_class WHERE oid = TG_RELID), 'USAGE');
    is_trigger boolean := is_owner AND pg_trigger_depth() > 1;
BEGIN
    IF coalesce(current_setting('rft.purge', true), '') <> '' AND is_owner THEN
        OLD.question := NEW.question;
    END IF;
    IF (NEW.review_id, NEW.experience_id, NEW.group_id, NEW.run_id, NEW.name, NEW.question, NEW.otherwise, NEW.asked_at, NEW.deadline,
        NEW.kind, NEW.wanted, NEW.rule, NEW.least, NEW.passing)
       IS DISTINCT FROM
       (OLD.review_id, OLD.experience_id, OLD.group_id, OLD.run_id, OLD.name, OLD.question, OLD.otherwise, OLD.asked_at, OLD.deadline,
        OLD.kind, OLD.wanted, OLD.rule, OLD.least, OLD.passing)
       OR ((NEW.answer_id, NEW.reward_label_id) IS DISTINCT FROM (OLD.answer_id, OLD.reward_label_id) AND NOT is_trigger) THEN
        RAISE EXCEPTION 'only the answer of a review can be changed (review %)', OLD.review_id
            USING HINT = 'UPDATE rft.review SET answer = ''pass'' WHERE review_id = …';
    END IF;
    IF NEW.answer IS DISTINCT FROM OLD.answer THEN
        IF OLD.kind IS NOT NULL AND NOT is_trigger THEN
            RAISE EXCEPTION 'review % is answered by annotations of the kind "%"', OLD.review_id, OLD.kind
                USING ERRCODE = 'invalid_parameter_value',
                      HINT = format('INSERT INTO rft.annotation (kind, target_id, value) VALUES (%L, %s, …), or rft label annotate.', OLD.kind, OLD.experience_id);
        ELSIF OLD.kind IS NULL AND NOT rft.may_label('reward', OLD.run_id, (SELECT t.taskset FROM rft.rollout_group g JOIN rft.task t USING (task_id) WHERE g.group_id = OLD.group_id)) THEN
            PERFORM rft.refuse_unpermitted('reward', 'experience ' || OLD.experience_id);
        ELSIF OLD.answer IS NOT NULL AND OLD.answered_at < OLD.deadline AND rft.clock() >= OLD.deadline THEN
            RAISE EXCEPTION 'review % was answered in time, and its deadline has passed: the answer is final', OLD.review_id
                USING HINT = CASE WHEN OLD.answer = 'drop' THEN 'It stays dropped, and a corrected reward does not bring it back.'
                    ELSE 'A reward can still be corrected: UPDATE rft.experience SET reward = … WHERE experience_id = …' END;
        END IF;
        IF NEW.reward_label_id IS NOT DISTINCT FROM OLD.reward_label_id THEN
            NEW.reward_label_id := NULL;
        END IF;
        NEW.author := coalesce(nullif(current_setting('rft.author', true), ''), session_user);
        NEW.session_user_name := session_user;
        NEW.answered_at := rft.clock();
    END IF;
    RETURN NEW;
END
$$;

-- As before, for reviews without a kind. The label is recorded, so that it can be undone with the answer, after a backup was restored, too.
CREATE OR REPLACE FUNCTION rft.answer_by_label() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    UPDATE rft.review w SET answer = 'pass', reward_label_id = l.label_id
    FROM (SELECT n.experience_id, max(n.label_id) AS label_id FROM new_labels n GROUP BY 1) l
    WHERE w.experience_id = l.experience_id AND w.kind IS NULL AND w.answer IS NULL AND rft.clock() < w.deadline;
    RETURN NULL;
END
$$;

CREATE OR REPLACE VIEW rft.v_review AS
SELECT w.review_id, w.experience_id, w.group_id, w.run_id, w.name, w.question, w.otherwise, w.answer, w.answer_id, w.author, w.session_user_name, w.asked_at,
       w.deadline, w.answered_at,
       CASE WHEN w.answer IS NOT NULL AND w.answered_at < w.deadline THEN w.answer::text
            WHEN rft.clock() >= w.deadline THEN w.otherwise::text ELSE 'waiting' END AS state,
       w.kind, w.wanted, w.rule, w.least, w.passing
FROM rft.review w;
COMMENT ON VIEW rft.v_review IS 'Questions with their current state: waiting, pass or drop. An answer after the deadline does not count.';
