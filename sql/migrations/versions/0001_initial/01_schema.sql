-- The schema, its clock, the refusal of changes to facts, and this buffer's identity.

CREATE SCHEMA IF NOT EXISTS rft;

COMMENT ON TABLE rft.schema_version IS 'The revision of this schema; Alembic maintains it.';
COMMENT ON COLUMN rft.schema_version.version_num IS 'The newest migration that was applied.';

-- Anyone may set rft.clock_shift, so that it counts only for accounts that could change this function. session_user, because within a
-- SECURITY DEFINER function current_user is the owner for everybody.
CREATE FUNCTION rft.clock() RETURNS timestamptz
LANGUAGE sql STABLE
AS $$
    SELECT clock_timestamp() + CASE
        WHEN coalesce(current_setting('rft.clock_shift', true), '') = '' THEN interval '0'
        WHEN pg_has_role(session_user, (SELECT nspowner FROM pg_namespace WHERE nspname = 'rft'), 'MEMBER')
            THEN current_setting('rft.clock_shift')::interval
        ELSE interval '0' END
$$;
COMMENT ON FUNCTION rft.clock() IS 'The only clock of leases and heartbeats: the database''s, shifted by the setting rft.clock_shift (tests; only in sessions of the schema''s owner).';

-- The one exception to "facts never change": a purge, which the owner of the tables runs with the setting rft.purge. For other roles
-- the setting has no effect.
CREATE FUNCTION rft.refuse_fact_change() RETURNS trigger
LANGUAGE plpgsql
AS $$
BEGIN
    IF (TG_OP = 'UPDATE' OR TG_OP = 'DELETE' AND TG_TABLE_NAME = 'group_prompt') AND coalesce(current_setting('rft.purge', true), '') <> ''
        AND pg_has_role(current_user, (SELECT relowner FROM pg_class WHERE oid = TG_RELID), 'USAGE') THEN
        RETURN NULL;
    END IF;
    RAISE EXCEPTION 'rft.% holds facts: % is refused', TG_TABLE_NAME, TG_OP
        USING ERRCODE = 'integrity_constraint_violation',
              DETAIL = 'What was sampled never changes; of rft.experience only reward and reward_final may be updated.',
              HINT = 'To correct a reward: UPDATE rft.experience SET reward = … WHERE experience_id = …. To exclude a task: UPDATE rft.task SET status = ''excluded''. To remove text and arrays for good: rft purge.';
END
$$;
COMMENT ON FUNCTION rft.refuse_fact_change() IS 'Trigger: facts are immutable; the error names the alternatives.';

CREATE TABLE rft.buffer (
    buffer_id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    archived_at timestamptz
);
CREATE UNIQUE INDEX buffer_single ON rft.buffer ((true));
INSERT INTO rft.buffer DEFAULT VALUES;
COMMENT ON TABLE rft.buffer IS 'This buffer: one row.';
COMMENT ON COLUMN rft.buffer.buffer_id IS 'Identifies the origin of imports in other buffers. A restored backup keeps it, since it is the same buffer. Names of segment files begin with its first 12 digits, so that files of another buffer in the same folder are not mistaken for orphans.';
COMMENT ON COLUMN rft.buffer.archived_at IS 'When a run was last archived. A transaction whose snapshot is older cannot lock this row, and so notices what it cannot read (rft.refuse_archived_change).';
