-- Archived runs: their texts, arrays and scores are in Parquet files, and nothing of them changes until they are restored.

CREATE TYPE rft.archive_status AS ENUM ('writing', 'archived', 'restored');
COMMENT ON TYPE rft.archive_status IS 'writing: files are being written or were left by a killed command, and all rows are whole; archived: the files hold what the rows have lost; restored: all rows are whole again, and the files are to be removed.';

CREATE TABLE rft.archive (
    run_id bigint PRIMARY KEY REFERENCES rft.run,
    status rft.archive_status NOT NULL DEFAULT 'writing',
    schema_version text NOT NULL,
    num_groups bigint NOT NULL DEFAULT 0,
    num_experiences bigint NOT NULL DEFAULT 0,
    num_tokens bigint NOT NULL DEFAULT 0,
    array_bytes bigint NOT NULL DEFAULT 0,
    author text NOT NULL CHECK (author <> ''),
    session_user_name text NOT NULL DEFAULT session_user,
    started_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    archived_at timestamptz
);
COMMENT ON TABLE rft.archive IS 'A run whose texts, arrays and scores are in Parquet files (rft archive). Its row goes when the run is restored (rft restore-run).';
COMMENT ON COLUMN rft.archive.run_id IS 'The run that is archived.';
COMMENT ON COLUMN rft.archive.status IS 'State of the archive.';
COMMENT ON COLUMN rft.archive.schema_version IS 'Version of the schema whose rows the files hold.';
COMMENT ON COLUMN rft.archive.num_groups IS 'Number of its groups.';
COMMENT ON COLUMN rft.archive.num_experiences IS 'Number of its experiences, which is that of the rows in the files of the table experience.';
COMMENT ON COLUMN rft.archive.num_tokens IS 'Number of their tokens, prompts included.';
COMMENT ON COLUMN rft.archive.array_bytes IS 'Bytes of the segments that the archive replaces.';
COMMENT ON COLUMN rft.archive.author IS 'Who archived it.';
COMMENT ON COLUMN rft.archive.session_user_name IS 'The database account that archived it.';
COMMENT ON COLUMN rft.archive.started_at IS 'When its first file was begun.';
COMMENT ON COLUMN rft.archive.archived_at IS 'When the rows were moved; NULL before.';

CREATE TABLE rft.archive_file (
    run_id bigint NOT NULL,
    path text NOT NULL CHECK (path ~ '^[a-z_]+/run=[A-Za-z0-9_.~%-]+/[0-9a-f]+-[0-9]+-[0-9]+\.parquet$'),
    table_name text NOT NULL,
    num_rows bigint NOT NULL,
    num_bytes bigint NOT NULL,
    checksum text NOT NULL,
    PRIMARY KEY (run_id, path)
);
COMMENT ON TABLE rft.archive_file IS 'A Parquet file of an archive.';
COMMENT ON COLUMN rft.archive_file.run_id IS 'The run whose rows it holds.';
COMMENT ON COLUMN rft.archive_file.path IS 'Its path below the folder of the archives.';
COMMENT ON COLUMN rft.archive_file.table_name IS 'The table whose rows it holds. experience: the columns of rft.v_experience and the arrays. segment: how the arrays were stored.';
COMMENT ON COLUMN rft.archive_file.num_rows IS 'Number of its rows.';
COMMENT ON COLUMN rft.archive_file.num_bytes IS 'Its size in bytes.';
COMMENT ON COLUMN rft.archive_file.checksum IS 'xxh3-64 of its bytes, hexadecimal.';

CREATE TABLE rft.archived_segment (
    segment_id bigint PRIMARY KEY,
    run_id bigint NOT NULL REFERENCES rft.run,
    length_bytes bigint NOT NULL,
    num_rows integer NOT NULL,
    checksum text NOT NULL,
    first_checksum text,
    created_at timestamptz NOT NULL
);
CREATE INDEX archived_segment_run ON rft.archived_segment (run_id);
COMMENT ON TABLE rft.archived_segment IS 'The row of rft.segment, without its address, of a segment whose arrays are in an archive.';
COMMENT ON COLUMN rft.archived_segment.segment_id IS 'Its key in rft.segment, to which it returns when the run is restored.';
COMMENT ON COLUMN rft.archived_segment.run_id IS 'The run in whose archive its arrays are.';
COMMENT ON COLUMN rft.archived_segment.length_bytes IS 'Length in bytes, as in rft.segment.';
COMMENT ON COLUMN rft.archived_segment.num_rows IS 'Rows of the record batch, as in rft.segment.';
COMMENT ON COLUMN rft.archived_segment.checksum IS 'As in rft.segment; the restored bytes are compared with it.';
COMMENT ON COLUMN rft.archived_segment.first_checksum IS 'Checksum before a purge, as in rft.segment; NULL if none has written it again.';
COMMENT ON COLUMN rft.archived_segment.created_at IS 'When it was first written, as in rft.segment.';

CREATE FUNCTION rft.why_no_arrays(of_segment bigint) RETURNS text
LANGUAGE sql STABLE
AS $$
    SELECT coalesce((SELECT format('is archived with the run %s: bring it back with rft restore-run %s', r.name, r.name)
                     FROM rft.archived_segment s JOIN rft.run r USING (run_id) WHERE s.segment_id = of_segment),
                    'has no token arrays any more')
$$;
COMMENT ON FUNCTION rft.why_no_arrays(bigint) IS 'Returns why an experience, or a group, whose segment is not in rft.segment cannot be trained on, as the end of a sentence.';

-- An archived run does not change, so that a restored run is what was archived. Whether a statement or archiving comes first is decided by
-- the lock of rft.archive: statements share it until their transactions end, and archiving waits for these before it looks for what they wrote.
-- LOCK TABLE and not a row: nothing is written, and a reader, which may not take this lock, cannot delay others. Where a transaction has one snapshot for all
-- its statements, that may be from before an archive. Such a transaction locks a row that each archive changes, which fails for an older snapshot.
CREATE FUNCTION rft.refuse_archived_change() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    found_run bigint;
    found_name text;
BEGIN
    LOCK TABLE rft.archive IN ROW SHARE MODE;
    IF current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN
        BEGIN
            PERFORM FROM rft.buffer FOR SHARE;
        EXCEPTION WHEN serialization_failure THEN
            RAISE EXCEPTION 'a run was archived after the snapshot of this transaction: % of rft.% is refused', TG_OP, TG_TABLE_NAME
                USING ERRCODE = 'serialization_failure', HINT = 'Run the transaction again.';
        END;
    END IF;
    IF NOT EXISTS (SELECT FROM rft.archive WHERE status = 'archived') THEN  -- the usual case, without a look at the rows
        RETURN NULL;
    END IF;
    CASE TG_ARGV[0]
        WHEN 'run_id' THEN
            SELECT n.run_id INTO found_run FROM new_rows n JOIN rft.archive a USING (run_id) WHERE a.status = 'archived' LIMIT 1;
        WHEN 'attempt_id' THEN
            SELECT t.run_id INTO found_run FROM (SELECT DISTINCT attempt_id FROM new_rows) n
            JOIN rft.run_attempt t USING (attempt_id) JOIN rft.archive a ON a.run_id = t.run_id WHERE a.status = 'archived' LIMIT 1;
        WHEN 'group_id' THEN
            SELECT g.run_id INTO found_run FROM (SELECT DISTINCT group_id FROM new_rows) n
            CROSS JOIN LATERAL (SELECT run_id FROM rft.rollout_group WHERE group_id = n.group_id OFFSET 0) g
            JOIN rft.archive a ON a.run_id = g.run_id WHERE a.status = 'archived' LIMIT 1;
        WHEN 'experience_id' THEN
            SELECT e.run_id INTO found_run FROM (SELECT DISTINCT experience_id FROM new_rows) n
            CROSS JOIN LATERAL (SELECT run_id FROM rft.experience WHERE experience_id = n.experience_id OFFSET 0) e
            JOIN rft.archive a ON a.run_id = e.run_id WHERE a.status = 'archived' LIMIT 1;
        WHEN 'pair' THEN
            SELECT e.run_id INTO found_run
            FROM (SELECT DISTINCT i.id FROM new_rows p CROSS JOIN LATERAL (VALUES (p.chosen_id), (p.rejected_id)) AS i (id)) n
            CROSS JOIN LATERAL (SELECT run_id FROM rft.experience WHERE experience_id = n.id OFFSET 0) e
            JOIN rft.archive a ON a.run_id = e.run_id WHERE a.status = 'archived' LIMIT 1;
    END CASE;
    IF found_run IS NOT NULL THEN
        SELECT name INTO found_name FROM rft.run WHERE run_id = found_run;
        RAISE EXCEPTION 'run "%" is archived: % of rft.% is refused', found_name, TG_OP, TG_TABLE_NAME
            USING ERRCODE = 'RFT02',
                  DETAIL = 'Its texts and arrays are in Parquet files, and its rows do not change meanwhile.',
                  HINT = format('Bring it back first: rft restore-run %s', found_name);
    END IF;
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION rft.refuse_archived_change() IS 'Trigger: refuses new rows of an archived run, and changes of its rows; the error names the command that brings it back. Its argument is the column that leads to the run, or pair: both sides of a pair.';

-- Triggers of one event run in the order of their names: these come first. Every table with rows of a run has one, except for what processes record
-- about themselves (workers, spans, turns, receivers of weights, usage of endpoints), which a process that is late may still do. Facts do not change in
-- any run, and the states of tasks and samplers are of no use without new rows.
DO $$
DECLARE
    r record;
BEGIN
    FOR r IN SELECT v.event, v.key, unnest(v.tables) AS name FROM (VALUES
        ('UPDATE', 'run_id', ARRAY['experience', 'review', 'run', 'rollout_group']),
        ('UPDATE', 'group_id', ARRAY['verdict']),
        ('UPDATE', 'attempt_id', ARRAY['draw']),
        ('DELETE', 'attempt_id', ARRAY['draw', 'batch', 'sampler_step']),
        ('INSERT', 'run_id', ARRAY['rollout_group', 'run_attempt', 'experience', 'review', 'sampler', 'sampler_lane', 'sampler_insert',
            'task_observation', 'task_stat', 'selector_state', 'selector_snapshot', 'policy_version', 'checkpoint', 'train_step', 'run_model',
            'evaluation', 'weight_transfer', 'operator_run', 'write_receipt', 'group_origin', 'import_file', 'worklist']),
        ('INSERT', 'group_id', ARRAY['rollout', 'group_prompt', 'group_baseline', 'partial_tokens', 'verdict']),
        ('INSERT', 'experience_id', ARRAY['score', 'label', 'experience_origin']),
        ('INSERT', 'pair', ARRAY['preference_pair']),
        ('INSERT', 'attempt_id', ARRAY['draw', 'batch', 'sampler_step'])
        ) AS v (event, key, tables)
    LOOP
        EXECUTE format(
            'CREATE TRIGGER archived_%1$s_%2$s AFTER %2$s ON rft.%1$I REFERENCING %4$s TABLE AS new_rows'
            ' FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_archived_change(%3$L)',
            r.name, r.event, r.key, CASE r.event WHEN 'DELETE' THEN 'OLD' ELSE 'NEW' END);
    END LOOP;
END
$$;
