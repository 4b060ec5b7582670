-- What was dropped by an answer is not brought back by a reward: the advice said so of both answers.

CREATE OR REPLACE FUNCTION rft.note_answer() RETURNS trigger
LANGUAGE plpgsql
AS $$
BEGIN
    IF coalesce(current_setting('rft.purge', true), '') <> ''
        AND pg_has_role(current_user, (SELECT relowner FROM pg_class WHERE oid = TG_RELID), 'USAGE') THEN
        OLD.question := NEW.question;
    END IF;
    IF (NEW.review_id, NEW.experience_id, NEW.group_id, NEW.run_id, NEW.name, NEW.question, NEW.otherwise, NEW.asked_at, NEW.deadline)
       IS DISTINCT FROM
       (OLD.review_id, OLD.experience_id, OLD.group_id, OLD.run_id, OLD.name, OLD.question, OLD.otherwise, OLD.asked_at, OLD.deadline)
       OR (NEW.answer_id IS DISTINCT FROM OLD.answer_id AND pg_trigger_depth() = 1) THEN
        RAISE EXCEPTION 'only the answer of a review can be changed (review %)', OLD.review_id
            USING HINT = 'UPDATE rft.review SET answer = ''pass'' WHERE review_id = …';
    END IF;
    IF NEW.answer IS DISTINCT FROM OLD.answer THEN
        IF OLD.answer IS NOT NULL AND OLD.answered_at < OLD.deadline AND rft.clock() >= OLD.deadline THEN
            RAISE EXCEPTION 'review % was answered in time, and its deadline has passed: the answer stands', OLD.review_id
                USING HINT = CASE WHEN OLD.answer = 'drop' THEN 'It stays dropped, and a corrected reward does not bring it back.'
                    ELSE 'A reward can still be corrected: UPDATE rft.experience SET reward = … WHERE experience_id = …' END;
        END IF;
        NEW.author := coalesce(nullif(current_setting('rft.author', true), ''), session_user);
        NEW.answered_at := rft.clock();
    END IF;
    RETURN NEW;
END
$$;
