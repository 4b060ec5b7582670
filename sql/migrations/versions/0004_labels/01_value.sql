-- What kinds of labels there are, and which values they accept. See docs/decisions/0056.

CREATE TYPE rft.label_type AS ENUM ('bool', 'number', 'choice', 'tags', 'rubric', 'text', 'edit', 'ranking', 'spans', 'turns');
COMMENT ON TYPE rft.label_type IS 'bool: true or false; number; choice: one of several words; tags: any of several words; rubric: a number for each criterion; text: a critique; edit: a better response; ranking: the experiences of a group from the best to the worst; spans: marked tokens or characters of a response; turns: a number for single turns.';

CREATE TYPE rft.label_target AS ENUM ('experience', 'rollout', 'group', 'task');
COMMENT ON TYPE rft.label_target IS 'What a kind of label is about: a row of rft.experience, rft.rollout, rft.rollout_group or rft.task.';

CREATE TYPE rft.label_level AS ENUM ('nominal', 'ordinal', 'interval');
COMMENT ON TYPE rft.label_level IS 'How values are compared. nominal: equal or not; ordinal: by their order; interval: by their distance.';

-- The functions of this file return what is wrong, as the end of the sentence "the value …", or NULL.

CREATE FUNCTION rft.why_wrong_number(value jsonb, limits jsonb) RETURNS text
LANGUAGE plpgsql IMMUTABLE
AS $$
DECLARE
    n numeric;
    low numeric := limits ->> 'min';
    high numeric := limits ->> 'max';
    places numeric;
BEGIN
    IF jsonb_typeof(value) IS DISTINCT FROM 'number' THEN
        RETURN 'must be a number';
    END IF;
    n := value;
    IF abs(n) >= 3.4e38 THEN  -- trainers compute with float32
        RETURN 'must be a finite number, between -3.4e38 and 3.4e38';
    ELSIF n < low OR n > high THEN
        RETURN format('must be a number%s%s', ' from ' || low, ' up to ' || high);
    ELSIF limits ? 'step' THEN
        -- Numbers that were computed as floating point may be off by a little.
        places := (n - coalesce(low, 0)) / (limits ->> 'step')::numeric;
        IF abs(places - round(places)) > 1e-6 THEN
            RETURN format('must be a number in steps of %s%s', limits ->> 'step', ' from ' || low);
        END IF;
    END IF;
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION rft.why_wrong_number(jsonb, jsonb) IS 'Returns why a value is no number within limits (min, max, step); NULL if it is one.';

CREATE FUNCTION rft.why_wrong_words(value jsonb) RETURNS text
LANGUAGE plpgsql IMMUTABLE
AS $$
BEGIN
    IF jsonb_typeof(value) IS DISTINCT FROM 'array' THEN
        RETURN 'must be a list of words';
    ELSIF EXISTS (SELECT FROM jsonb_array_elements(value) e WHERE jsonb_typeof(e) <> 'string' OR btrim(e #>> '{}') = '' OR octet_length(e #>> '{}') > 200) THEN
        RETURN 'must be a list of words, none of them empty or longer than 200 bytes';
    ELSIF (SELECT count(*) <> count(DISTINCT e) FROM jsonb_array_elements(value) e) THEN
        RETURN 'must not contain a word twice';
    END IF;
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION rft.why_wrong_words(jsonb) IS 'Returns why a value is no list of different words; NULL if it is one.';

CREATE FUNCTION rft.why_wrong_spans(value jsonb, labels jsonb) RETURNS text
LANGUAGE plpgsql IMMUTABLE
AS $$
DECLARE
    span jsonb;
BEGIN
    IF jsonb_typeof(value) IS DISTINCT FROM 'array' THEN
        RETURN 'must be a list of spans: [{"start": 3, "end": 7, "unit": "token", "label": "wrong", "note": ""}]';
    END IF;
    FOR span IN SELECT e FROM jsonb_array_elements(value) e LOOP
        IF jsonb_typeof(span) <> 'object' OR NOT span ?& ARRAY['start', 'end', 'label']
           OR span - ARRAY['start', 'end', 'label', 'unit', 'note'] <> '{}' THEN
            RETURN format('has a span %s: a span has start, end, label and, optionally, unit and note', left(span::text, 100));
        ELSIF span ->> 'start' !~ '^[0-9]{1,9}$' OR span ->> 'end' !~ '^[0-9]{1,9}$' OR (span ->> 'start')::integer >= (span ->> 'end')::integer THEN
            RETURN format('has a span from %s to %s: start and end are whole numbers from 0, and end is greater', left(span ->> 'start', 20), left(span ->> 'end', 20));
        ELSIF coalesce(span ->> 'unit', 'token') NOT IN ('token', 'char') THEN
            RETURN format('has a span with the unit %s: allowed are token and char', left(span ->> 'unit', 50));
        ELSIF jsonb_typeof(span -> 'label') <> 'string' OR NOT labels ? (span ->> 'label') THEN
            RETURN format('has a span with the label %s: allowed are %s', left(span ->> 'label', 50), labels);
        ELSIF jsonb_typeof(coalesce(span -> 'note', '""')) <> 'string' THEN
            RETURN 'has a span whose note is no text';
        END IF;
    END LOOP;
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION rft.why_wrong_spans(jsonb, jsonb) IS 'Returns why a value is no list of spans with these labels; NULL if it is one.';

CREATE FUNCTION rft.why_wrong_turns(value jsonb, limits jsonb) RETURNS text
LANGUAGE plpgsql IMMUTABLE
AS $$
DECLARE
    item jsonb;
    problem text;
BEGIN
    IF jsonb_typeof(value) IS DISTINCT FROM 'array' OR value = '[]' THEN
        RETURN 'must be a list of turns: [{"turn": 0, "value": -1}]';
    END IF;
    FOR item IN SELECT e FROM jsonb_array_elements(value) e LOOP
        IF jsonb_typeof(item) <> 'object' OR NOT item ?& ARRAY['turn', 'value'] OR item - ARRAY['turn', 'value'] <> '{}'
           OR item ->> 'turn' !~ '^[0-9]{1,9}$' THEN
            RETURN format('has an item %s: an item has a turn, from 0, and a value', left(item::text, 100));
        END IF;
        problem := rft.why_wrong_number(item -> 'value', limits);
        IF problem IS NOT NULL THEN
            RETURN format('of turn %s %s', item ->> 'turn', problem);
        END IF;
    END LOOP;
    IF (SELECT count(*) <> count(DISTINCT e ->> 'turn') FROM jsonb_array_elements(value) e) THEN
        RETURN 'has a turn twice';
    END IF;
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION rft.why_wrong_turns(jsonb, jsonb) IS 'Returns why a value is no list of turns with numbers within limits; NULL if it is one.';

CREATE FUNCTION rft.why_wrong_ranking(value jsonb) RETURNS text
LANGUAGE plpgsql IMMUTABLE
AS $$
DECLARE
    shape CONSTANT text := 'must be {"order": [[11], [12, 13]]}: ids of experiences from the best to the worst, those of a tie in one list';
BEGIN
    IF jsonb_typeof(value) IS DISTINCT FROM 'object' OR value - 'order' <> '{}' OR jsonb_typeof(value -> 'order') IS DISTINCT FROM 'array' THEN
        RETURN shape;
    ELSIF EXISTS (SELECT FROM jsonb_array_elements(value -> 'order') tie WHERE jsonb_typeof(tie) <> 'array' OR tie = '[]') THEN
        RETURN shape;
    ELSIF EXISTS (SELECT FROM jsonb_path_query(value, '$.order[*][*]') id WHERE jsonb_typeof(id) <> 'number' OR id #>> '{}' !~ '^[0-9]{1,18}$') THEN
        RETURN shape;
    ELSIF (SELECT count(*) < 2 OR count(*) <> count(DISTINCT id) FROM jsonb_path_query(value, '$.order[*][*]') id) THEN
        RETURN 'must rank at least two experiences, each of them once';
    END IF;
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION rft.why_wrong_ranking(jsonb) IS 'Returns why a value is no ranking of experiences; NULL if it is one. Whether they are of one group is another question.';

CREATE FUNCTION rft.why_wrong_value(of_type rft.label_type, spec jsonb, value jsonb) RETURNS text
LANGUAGE plpgsql IMMUTABLE
AS $$
DECLARE
    problem text;
    criterion text;
BEGIN
    CASE of_type
        WHEN 'bool' THEN
            RETURN CASE WHEN jsonb_typeof(value) IS DISTINCT FROM 'boolean' THEN 'must be true or false' END;
        WHEN 'number' THEN
            RETURN rft.why_wrong_number(value, spec);
        WHEN 'choice' THEN
            RETURN CASE WHEN jsonb_typeof(value) IS DISTINCT FROM 'string' OR NOT spec -> 'choices' ? (value #>> '{}')
                        THEN 'must be one of ' || (spec ->> 'choices') END;
        WHEN 'tags' THEN
            problem := rft.why_wrong_words(value);
            IF problem IS NULL AND NOT coalesce((spec ->> 'open')::boolean, false) AND NOT value <@ (spec -> 'tags') THEN
                problem := 'must be a list of words from ' || (spec ->> 'tags');
            END IF;
            RETURN problem;
        WHEN 'rubric' THEN
            IF jsonb_typeof(value) IS DISTINCT FROM 'object'
               OR (SELECT array_agg(k ORDER BY k) FROM jsonb_object_keys(value) k) IS DISTINCT FROM
                  (SELECT array_agg(k ORDER BY k) FROM jsonb_object_keys(spec -> 'criteria') k) THEN
                RETURN format('must have a number for each of %s', (SELECT string_agg(k, ', ' ORDER BY k) FROM jsonb_object_keys(spec -> 'criteria') k));
            END IF;
            FOR criterion IN SELECT k FROM jsonb_object_keys(value) k ORDER BY k LOOP
                problem := rft.why_wrong_number(value -> criterion, spec -> 'criteria' -> criterion);
                IF problem IS NOT NULL THEN
                    RETURN format('of %s %s', criterion, problem);
                END IF;
            END LOOP;
            RETURN NULL;
        WHEN 'text' THEN
            RETURN CASE WHEN jsonb_typeof(value) IS DISTINCT FROM 'string' OR btrim(value #>> '{}') = '' THEN 'must be a text that is not empty' END;
        WHEN 'edit' THEN
            RETURN CASE WHEN jsonb_typeof(value) IS DISTINCT FROM 'object' OR value - 'response' <> '{}'
                             OR jsonb_typeof(value -> 'response') IS DISTINCT FROM 'string' OR btrim(value ->> 'response') = ''
                        THEN 'must be {"response": "…"} with a text that is not empty' END;
        WHEN 'ranking' THEN
            RETURN rft.why_wrong_ranking(value);
        WHEN 'spans' THEN
            RETURN rft.why_wrong_spans(value, spec -> 'labels');
        WHEN 'turns' THEN
            RETURN rft.why_wrong_turns(value, spec);
    END CASE;
END
$$;
COMMENT ON FUNCTION rft.why_wrong_value(rft.label_type, jsonb, jsonb) IS 'Returns why a kind with this type and specification does not accept a value, as the end of the sentence "the value …"; NULL if it does.';

CREATE FUNCTION rft.why_wrong_limits(limits jsonb) RETURNS text
LANGUAGE plpgsql IMMUTABLE
AS $$
BEGIN
    IF EXISTS (SELECT FROM jsonb_each(limits) l WHERE l.key IN ('min', 'max', 'step') AND rft.why_wrong_number(l.value, '{}') IS NOT NULL) THEN
        RETURN 'must have finite numbers as min, max and step';
    ELSIF (limits ->> 'min')::numeric >= (limits ->> 'max')::numeric THEN
        RETURN 'must have a min below its max';
    ELSIF (limits ->> 'step')::numeric <= 0 THEN
        RETURN 'must have a step above 0';
    END IF;
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION rft.why_wrong_limits(jsonb) IS 'Returns why min, max and step are no limits of numbers; NULL if they are.';

CREATE FUNCTION rft.why_wrong_spec(of_type rft.label_type, spec jsonb) RETURNS text
LANGUAGE plpgsql IMMUTABLE
AS $$
DECLARE
    known text[] := CASE of_type
        WHEN 'number' THEN ARRAY['min', 'max', 'step'] WHEN 'turns' THEN ARRAY['min', 'max', 'step'] WHEN 'choice' THEN ARRAY['choices']
        WHEN 'tags' THEN ARRAY['tags', 'open'] WHEN 'rubric' THEN ARRAY['criteria'] WHEN 'spans' THEN ARRAY['labels'] ELSE '{}' END;
    words text := CASE of_type WHEN 'choice' THEN 'choices' WHEN 'tags' THEN 'tags' WHEN 'spans' THEN 'labels' END;
    least_words integer := CASE WHEN of_type = 'choice' THEN 2 WHEN of_type = 'tags' AND spec -> 'open' = 'true' THEN 0 ELSE 1 END;
    criterion record;
    problem text;
BEGIN
    IF jsonb_typeof(spec) IS DISTINCT FROM 'object' OR spec - known <> '{}' THEN
        RETURN format('must be an object; its keys for the type %s: %s', of_type, CASE WHEN known = '{}' THEN 'none' ELSE array_to_string(known, ', ') END);
    ELSIF words IS NOT NULL THEN
        problem := rft.why_wrong_words(spec -> words);
        IF problem IS NOT NULL THEN
            RETURN format('must have %s, which %s', words, problem);
        ELSIF jsonb_array_length(spec -> words) < least_words THEN
            RETURN format('must have at least %s %s', least_words, words);
        ELSIF jsonb_typeof(coalesce(spec -> 'open', 'false')) <> 'boolean' THEN
            RETURN 'must have true or false as open';
        END IF;
    ELSIF of_type = 'rubric' THEN
        IF jsonb_typeof(spec -> 'criteria') IS DISTINCT FROM 'object' OR spec -> 'criteria' = '{}' THEN
            RETURN 'must have criteria: {"correctness": {"min": 0, "max": 3, "description": "…"}}';
        END IF;
        FOR criterion IN SELECT key AS name, value AS limits FROM jsonb_each(spec -> 'criteria') LOOP
            IF btrim(criterion.name) = '' OR jsonb_typeof(criterion.limits) <> 'object' OR criterion.limits - ARRAY['min', 'max', 'step', 'description'] <> '{}'
               OR jsonb_typeof(coalesce(criterion.limits -> 'description', '""')) <> 'string' THEN
                RETURN format('has the criterion "%s": a criterion is an object; its keys: min, max, step, description', criterion.name);
            END IF;
            problem := rft.why_wrong_limits(criterion.limits);
            IF problem IS NOT NULL THEN
                RETURN format('of the criterion "%s" %s', criterion.name, problem);
            END IF;
        END LOOP;
    ELSIF known <> '{}' THEN
        RETURN rft.why_wrong_limits(spec);
    END IF;
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION rft.why_wrong_spec(rft.label_type, jsonb) IS 'Returns why a specification does not fit its type, as the end of the sentence "the specification …"; NULL if it does.';
