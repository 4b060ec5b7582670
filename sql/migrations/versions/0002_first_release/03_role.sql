-- The parts of a purge are the owner's, as the purge is.

CREATE OR REPLACE FUNCTION rft.grant_roles() RETURNS text[]
LANGUAGE plpgsql
AS $$
DECLARE
    held text[] := (SELECT coalesce(array_agg(rolname::text ORDER BY rolname), '{}') FROM pg_roles
                    WHERE rolname IN ('rft_reader', 'rft_labeler', 'rft_worker'));
    -- Functions that write, but only with the owner's rights.
    owners_only CONSTANT text[] := ARRAY[
        'create_roles', 'grant_roles', 'purge_texts', 'purge_outcomes', 'purge_tasks', 'purge_errors', 'lock_purged', 'correct_verdicts'];
    role text;
    granted record;
BEGIN
    REVOKE ALL ON ALL ROUTINES IN SCHEMA rft FROM PUBLIC;
    FOREACH role IN ARRAY held LOOP
        EXECUTE format('REVOKE ALL ON ALL TABLES IN SCHEMA rft FROM %I', role);
        EXECUTE format('REVOKE ALL ON ALL SEQUENCES IN SCHEMA rft FROM %I', role);
        EXECUTE format('REVOKE ALL ON ALL ROUTINES IN SCHEMA rft FROM %I', role);
        EXECUTE format('GRANT USAGE ON SCHEMA rft TO %I', role);
        EXECUTE format('GRANT SELECT ON ALL TABLES IN SCHEMA rft TO %I', role);
    END LOOP;
    -- What reads runs with its caller's rights. A trigger's function needs no right to run, only to be attached to a table, which no role may.
    FOR granted IN
        SELECT p.oid::regprocedure AS routine, p.provolatile <> 'v' AS reads FROM pg_proc p
        WHERE p.pronamespace = 'rft'::regnamespace AND p.prorettype <> 'trigger'::regtype AND NOT p.prosecdef AND p.proname <> ALL (owners_only)
    LOOP
        FOREACH role IN ARRAY held LOOP
            IF granted.reads OR role = 'rft_worker' THEN
                EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %I', granted.routine, role);
            END IF;
        END LOOP;
    END LOOP;
    IF 'rft_labeler' = ANY (held) THEN
        GRANT UPDATE (reward, reward_final) ON rft.experience TO rft_labeler;
        -- A person's preference between two answers; source and time are not theirs to set.
        GRANT INSERT (chosen_id, rejected_id, author, margin) ON rft.preference_pair TO rft_labeler;
        -- A person's answer to a question.
        GRANT UPDATE (answer) ON rft.review TO rft_labeler;
        GRANT EXECUTE ON FUNCTION rft.lock_groups_and_reviews(bigint[]), rft.begin_label_batches(integer) TO rft_labeler;
    END IF;
    IF 'rft_worker' = ANY (held) THEN
        FOR granted IN SELECT * FROM rft.worker_rights() LOOP
            EXECUTE format('GRANT %s ON rft.%I TO rft_worker', concat_ws(', ',
                CASE WHEN granted.may_insert THEN 'INSERT' END, CASE WHEN granted.may_delete THEN 'DELETE' END,
                CASE WHEN granted.may_update = '{*}' THEN 'UPDATE'
                     WHEN granted.may_update <> '{}' THEN format('UPDATE (%s)', array_to_string(granted.may_update, ', ')) END),
                granted.table_name);
        END LOOP;
        -- Ids that are taken before the rows are written.
        FOR granted IN SELECT pg_get_serial_sequence(format('rft.%I', w.table_name), a.attname) AS sequence
            FROM rft.worker_rights() w JOIN pg_attribute a ON a.attrelid = format('rft.%I', w.table_name)::regclass AND a.attidentity <> ''
            WHERE w.may_insert
        LOOP
            EXECUTE format('GRANT USAGE ON SEQUENCE %s TO rft_worker', granted.sequence);
        END LOOP;
        GRANT EXECUTE ON FUNCTION rft.lock_labels(), rft.analyze_worklist(), rft.lock_groups_and_reviews(bigint[]),
            rft.begin_label_batches(integer), rft.compact_task_changes(text) TO rft_worker;
    END IF;
    RETURN held;
END
$$;
