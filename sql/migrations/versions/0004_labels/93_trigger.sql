-- The triggers of all schemas find the objects of this schema and of pg_catalog alone, see 0003_agents/93_trigger.sql.
DO $$
DECLARE
    found record;
BEGIN
    FOR found IN SELECT p.oid::regprocedure AS routine FROM pg_proc p
        WHERE p.pronamespace = 'rft'::regnamespace AND p.prorettype = 'trigger'::regtype AND p.proconfig IS NULL
    LOOP
        EXECUTE format('ALTER FUNCTION %s SET search_path = pg_catalog, pg_temp', found.routine);
    END LOOP;
END
$$;
