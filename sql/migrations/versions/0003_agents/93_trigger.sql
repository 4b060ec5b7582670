-- Triggers that run with the rights of an account find the objects of this schema and of pg_catalog, not those that the account made: with a
-- temporary table pg_namespace, a labeller moved the clock, and answered questions after their deadline. 0004_labels/93_trigger.sql sets the path of all.

-- The names in such a body are looked up now.
CREATE OR REPLACE FUNCTION rft.clock() RETURNS timestamptz
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT clock_timestamp() + CASE
        WHEN coalesce(current_setting('rft.clock_shift', true), '') = '' THEN interval '0'
        WHEN pg_has_role(session_user, (SELECT nspowner FROM pg_namespace WHERE nspname = 'rft'), 'MEMBER')
            THEN current_setting('rft.clock_shift')::interval
        ELSE interval '0' END;
END;
