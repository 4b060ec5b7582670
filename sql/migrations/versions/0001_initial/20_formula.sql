-- Formulas of priorities: the columns they may use, the check when one is written, and their values.

CREATE FUNCTION rft.formula_columns(of_run bigint, of_items bigint[], of_priorities double precision[], of_times integer[])
RETURNS TABLE (
    group_id bigint, priority double precision, mean_reward double precision, std_reward double precision, min_reward double precision,
    max_reward double precision, num_experiences double precision, num_response_tokens double precision, num_labels double precision,
    times_sampled double precision, explore_step double precision, policy_step double precision, task_pass_rate double precision,
    task_attempts double precision)
LANGUAGE sql STABLE
AS $$
    SELECT i.item_id, i.priority, e.mean_reward, coalesce(e.std_reward, 0), e.min_reward, e.max_reward, e.num_experiences,
           e.num_response_tokens, e.num_labels, i.times, g.explore_step, e.policy_step, coalesce(s.alpha / (s.alpha + s.beta), 0.5),
           coalesce(s.attempts, 0)
    FROM unnest(of_items, of_priorities, of_times) AS i (item_id, priority, times)
    CROSS JOIN LATERAL (SELECT run_id, task_id, explore_step FROM rft.rollout_group WHERE group_id = i.item_id OFFSET 0) g
    JOIN rft.run r ON r.run_id = g.run_id
    LEFT JOIN rft.task_stat s ON s.run_id = g.run_id AND s.task_id = g.task_id
    LEFT JOIN LATERAL (
        SELECT avg(t.reward) AS mean_reward, stddev_pop(t.reward) AS std_reward, min(t.reward) AS min_reward, max(t.reward) AS max_reward,
               count(*)::double precision AS num_experiences, avg(x.num_response_tokens)::double precision AS num_response_tokens,
               sum(t.labels)::double precision AS num_labels, min(t.step)::double precision AS policy_step
        FROM rft.experience x
        CROSS JOIN LATERAL (
            SELECT (SELECT count(*) FROM rft.label l WHERE l.experience_id = x.experience_id) AS labels,
                   (SELECT p.trainer_step FROM rft.policy_version p WHERE p.policy_version_id = x.policy_version_min) AS step,
                   CASE WHEN x.reward_final THEN x.reward ELSE coalesce((
                       SELECT v.reward FROM rft.verdict v WHERE v.experience_id = x.experience_id AND v.newest_of = r.pipeline_version), x.reward) END AS reward) t
        WHERE x.group_id = i.item_id) e ON true
    WHERE g.run_id = of_run
$$;
COMMENT ON FUNCTION rft.formula_columns IS 'Returns the values of a group that a priority formula may use. priority: set by pipeline or trainer; rewards: of its experiences, as currently used for training; num_response_tokens: mean; num_labels: number of relabels; policy_step: trainer step of the oldest policy, NULL if no policy sampled; task_pass_rate, task_attempts: the run''s statistics of its task.';

-- A formula is text that other accounts execute. It must therefore be one expression over the columns above, and use only what is part of
-- PostgreSQL: the code of a user's function, type or operator would run with the rights of the account that draws.
-- PostgreSQL itself decides. A view is only parsed, and pg_depend then names what of it is not PostgreSQL's own, before anything could run. A
-- generated column allows one expression over the table's columns, with no subqueries and nothing that differs between calls; constant parts
-- of it are computed. A semicolon would end the statement.
CREATE FUNCTION rft.checked_formula(formula text) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    foreign_object text;
    printed text;
BEGIN
    IF strpos(formula, ';') > 0 THEN
        RAISE EXCEPTION 'it contains a semicolon' USING ERRCODE = 'syntax_error';
    END IF;
    CREATE TEMPORARY TABLE formula_check AS SELECT * FROM rft.formula_columns(0, '{}', '{}', '{}');
    -- On a new line, so that a comment cannot hide what follows.
    EXECUTE format(E'CREATE TEMPORARY VIEW formula_view AS SELECT (%s\n)::float8 AS result FROM pg_temp.formula_check', formula);
    SELECT pg_describe_object(d.refclassid, d.refobjid, d.refobjsubid) INTO foreign_object
    FROM pg_rewrite r JOIN pg_depend d ON d.classid = 'pg_rewrite'::regclass AND d.objid = r.oid
    WHERE r.ev_class = 'pg_temp.formula_view'::regclass
      AND (d.refclassid <> 'pg_class'::regclass OR d.refobjid NOT IN (r.ev_class, 'pg_temp.formula_check'::regclass)) LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'it uses the %, which is not part of PostgreSQL', foreign_object USING ERRCODE = 'insufficient_privilege';
    END IF;
    DROP VIEW pg_temp.formula_view;
    EXECUTE format(E'ALTER TABLE pg_temp.formula_check ADD COLUMN result float8 GENERATED ALWAYS AS ((%s\n)::float8) STORED', formula);
    SELECT pg_get_expr(adbin, adrelid) INTO printed FROM pg_attrdef WHERE adrelid = 'pg_temp.formula_check'::regclass;
    DROP TABLE pg_temp.formula_check;
    -- As it will be used: not over a table, which has columns of the system, too.
    EXECUTE format('SELECT (%s) FROM rft.formula_columns(0, ''{}'', ''{}'', ''{}'') LIMIT 0', printed);
    RETURN printed;
END
$$;
COMMENT ON FUNCTION rft.checked_formula(text) IS 'Returns a priority formula as PostgreSQL prints it after parsing. Raises an error unless it is one expression over the columns of rft.formula_columns that uses only what is part of PostgreSQL. Nothing of it is executed but constant parts.';

CREATE FUNCTION rft.check_sampler() RETURNS trigger
LANGUAGE plpgsql
AS $$
BEGIN
    NEW.formula := rft.checked_formula(NEW.formula);
    RETURN NEW;
END
$$;
COMMENT ON FUNCTION rft.check_sampler() IS 'Trigger: a formula is checked when it is written.';
CREATE TRIGGER sampler_formula
    BEFORE INSERT OR UPDATE OF formula ON rft.sampler FOR EACH ROW WHEN (NEW.formula IS NOT NULL) EXECUTE FUNCTION rft.check_sampler();

CREATE FUNCTION rft.formula_values(of_run bigint, of_items bigint[], of_priorities double precision[], of_times integer[])
RETURNS double precision[]
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_material = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    formula CONSTANT text := (SELECT s.formula FROM rft.sampler s WHERE s.run_id = of_run);
    query text;
    found double precision[];
BEGIN
    IF formula IS NULL THEN
        RETURN of_priorities;
    END IF;
    -- Groups are looked up one after the other by key, because a join of all of them with their columns could be planned as comparing
    -- each with each.
    query := format(
        'SELECT array_agg(v.value ORDER BY i.place) FROM unnest($2, $3, $4) WITH ORDINALITY AS i (item_id, priority, times, place)'
        ' LEFT JOIN LATERAL (SELECT (%s)::double precision AS value FROM rft.formula_columns($1, ARRAY[i.item_id], ARRAY[i.priority],'
        ' ARRAY[i.times])) v ON true', formula);
    BEGIN
        EXECUTE query INTO found USING of_run, of_items, of_priorities, of_times;
    EXCEPTION WHEN data_exception THEN
        -- A division by zero in one group must not stop the writers of the others.
        IF cardinality(of_items) = 1 THEN
            RETURN ARRAY[0.0];
        END IF;
        FOR i IN 1 .. cardinality(of_items) LOOP
            found := found || rft.formula_values(of_run, of_items[i:i], of_priorities[i:i], of_times[i:i]);
        END LOOP;
    END;
    RETURN found;
END
$$;
COMMENT ON FUNCTION rft.formula_values IS 'Returns the formula''s value for each group, in the order given; 0 where it cannot be computed (division by zero, overflow).';
