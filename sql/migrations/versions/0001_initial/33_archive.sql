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
    author text NOT NULL,
    session_user_name text NOT NULL DEFAULT session_user,
    started_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    archived_at timestamptz
);
COMMENT ON TABLE rft.archive IS 'A run whose texts, arrays and scores are in Parquet files (rft archive). Its row goes when the run is restored (rft restore-run).';
COMMENT ON COLUMN rft.archive.run_id IS 'The run.';
COMMENT ON COLUMN rft.archive.status IS 'State of the archive.';
COMMENT ON COLUMN rft.archive.schema_version IS 'Version of the schema whose rows the files hold.';
COMMENT ON COLUMN rft.archive.num_groups IS 'Number of its groups.';
COMMENT ON COLUMN rft.archive.num_experiences IS 'Number of its experiences, which is that of the rows in the files of the table experience.';
COMMENT ON COLUMN rft.archive.num_tokens IS 'Number of their tokens, prompts included.';
COMMENT ON COLUMN rft.archive.array_bytes IS 'Bytes of the segments that the archive replaces.';
COMMENT ON COLUMN rft.archive.author IS 'Who archived it.';
COMMENT ON COLUMN rft.archive.session_user_name IS 'The database user.';
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
COMMENT ON COLUMN rft.archive_file.run_id IS 'The run.';
COMMENT ON COLUMN rft.archive_file.path IS 'Its path below the folder of the archives.';
COMMENT ON COLUMN rft.archive_file.table_name IS 'The table whose rows it holds. experience: the columns of rft.v_experience and the arrays. segment: how the arrays were stored.';
COMMENT ON COLUMN rft.archive_file.num_rows IS 'Number of its rows.';
COMMENT ON COLUMN rft.archive_file.num_bytes IS 'Its size.';
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
COMMENT ON COLUMN rft.archived_segment.segment_id IS 'The segment.';
COMMENT ON COLUMN rft.archived_segment.run_id IS 'The archived run.';
COMMENT ON COLUMN rft.archived_segment.length_bytes IS 'As in rft.segment.';
COMMENT ON COLUMN rft.archived_segment.num_rows IS 'As in rft.segment.';
COMMENT ON COLUMN rft.archived_segment.checksum IS 'As in rft.segment; the restored bytes are compared with it.';
COMMENT ON COLUMN rft.archived_segment.first_checksum IS 'As in rft.segment.';
COMMENT ON COLUMN rft.archived_segment.created_at IS 'As in rft.segment.';

CREATE FUNCTION rft.why_no_arrays(of_segment bigint) RETURNS text
LANGUAGE sql STABLE
AS $$
    SELECT coalesce((SELECT format('is archived with the run %s: bring it back with rft restore-run %s', r.name, r.name)
                     FROM rft.archived_segment s JOIN rft.run r USING (run_id) WHERE s.segment_id = of_segment),
                    'has no token arrays any more')
$$;
COMMENT ON FUNCTION rft.why_no_arrays(bigint) IS 'Returns why an experience, or a group, whose segment is not in rft.segment cannot be trained on, as the end of a sentence.';

-- An archived run does not change, so that restoring it gives back what was archived. Whether a statement or archiving comes first is decided by
-- the lock of rft.archive: statements share it until their transactions end, and archiving waits for these before it looks for what they wrote.
-- LOCK TABLE and not a row: nothing is written, and a reader, who may not take this lock, blocks nobody.
CREATE FUNCTION rft.refuse_archived_change() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    found_run bigint;
    found_name text;
BEGIN
    LOCK TABLE rft.archive IN ROW SHARE MODE;
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
        WHEN 'consumer' THEN
            SELECT a.run_id INTO found_run FROM (SELECT DISTINCT consumer FROM new_rows) n
            JOIN rft.archive a ON n.consumer IN ('trainer/' || a.run_id, 'pipeline/' || a.run_id, 'selection/' || a.run_id)
            WHERE a.status = 'archived' LIMIT 1;
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

-- Triggers of one event run in the order of their names: these come first. Every table with rows of a run has one, but for what processes record
-- about themselves (workers, spans, turns, receivers of weights, usage of endpoints), which a process that is late may still do.
CREATE TRIGGER archived_experience_update AFTER UPDATE ON rft.experience REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_archived_change('run_id');
CREATE TRIGGER archived_review_update AFTER UPDATE ON rft.review REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_archived_change('run_id');
CREATE TRIGGER archived_run_update AFTER UPDATE ON rft.run REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_archived_change('run_id');
-- What was decided and drawn. Facts are refused for every run, and the states of tasks and samplers are of no use without new rows.
CREATE TRIGGER archived_rollout_group_update AFTER UPDATE ON rft.rollout_group REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_archived_change('run_id');
CREATE TRIGGER archived_verdict_update AFTER UPDATE ON rft.verdict REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_archived_change('group_id');
CREATE TRIGGER archived_draw_update AFTER UPDATE ON rft.draw REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_archived_change('attempt_id');
CREATE TRIGGER archived_draw_delete AFTER DELETE ON rft.draw REFERENCING OLD TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_archived_change('attempt_id');
CREATE TRIGGER archived_batch_delete AFTER DELETE ON rft.batch REFERENCING OLD TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_archived_change('attempt_id');
CREATE TRIGGER archived_sampler_step_delete AFTER DELETE ON rft.sampler_step REFERENCING OLD TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_archived_change('attempt_id');
CREATE TRIGGER archived_rollout_group_insert AFTER INSERT ON rft.rollout_group REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_archived_change('run_id');
CREATE TRIGGER archived_run_attempt_insert AFTER INSERT ON rft.run_attempt REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_archived_change('run_id');
CREATE TRIGGER archived_experience_insert AFTER INSERT ON rft.experience REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_archived_change('run_id');
CREATE TRIGGER archived_rollout_insert AFTER INSERT ON rft.rollout REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_archived_change('group_id');
CREATE TRIGGER archived_group_prompt_insert AFTER INSERT ON rft.group_prompt REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_archived_change('group_id');
CREATE TRIGGER archived_group_baseline_insert AFTER INSERT ON rft.group_baseline REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_archived_change('group_id');
CREATE TRIGGER archived_partial_tokens_insert AFTER INSERT ON rft.partial_tokens REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_archived_change('group_id');
CREATE TRIGGER archived_verdict_insert AFTER INSERT ON rft.verdict REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_archived_change('group_id');
CREATE TRIGGER archived_score_insert AFTER INSERT ON rft.score REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_archived_change('experience_id');
CREATE TRIGGER archived_label_insert AFTER INSERT ON rft.label REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_archived_change('experience_id');
CREATE TRIGGER archived_preference_pair_insert AFTER INSERT ON rft.preference_pair REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_archived_change('pair');
CREATE TRIGGER archived_review_insert AFTER INSERT ON rft.review REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_archived_change('run_id');
CREATE TRIGGER archived_worklist_insert AFTER INSERT ON rft.worklist REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_archived_change('consumer');
CREATE TRIGGER archived_draw_insert AFTER INSERT ON rft.draw REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_archived_change('attempt_id');
CREATE TRIGGER archived_batch_insert AFTER INSERT ON rft.batch REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_archived_change('attempt_id');
CREATE TRIGGER archived_sampler_step_insert AFTER INSERT ON rft.sampler_step REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_archived_change('attempt_id');
CREATE TRIGGER archived_sampler_insert AFTER INSERT ON rft.sampler REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_archived_change('run_id');
CREATE TRIGGER archived_sampler_lane_insert AFTER INSERT ON rft.sampler_lane REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_archived_change('run_id');
CREATE TRIGGER archived_sampler_insert_insert AFTER INSERT ON rft.sampler_insert REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_archived_change('run_id');
CREATE TRIGGER archived_task_observation_insert AFTER INSERT ON rft.task_observation REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_archived_change('run_id');
CREATE TRIGGER archived_task_stat_insert AFTER INSERT ON rft.task_stat REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_archived_change('run_id');
CREATE TRIGGER archived_selector_state_insert AFTER INSERT ON rft.selector_state REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_archived_change('run_id');
CREATE TRIGGER archived_selector_snapshot_insert AFTER INSERT ON rft.selector_snapshot REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_archived_change('run_id');
CREATE TRIGGER archived_policy_version_insert AFTER INSERT ON rft.policy_version REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_archived_change('run_id');
CREATE TRIGGER archived_checkpoint_insert AFTER INSERT ON rft.checkpoint REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_archived_change('run_id');
CREATE TRIGGER archived_train_step_insert AFTER INSERT ON rft.train_step REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_archived_change('run_id');
CREATE TRIGGER archived_run_model_insert AFTER INSERT ON rft.run_model REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_archived_change('run_id');
CREATE TRIGGER archived_evaluation_insert AFTER INSERT ON rft.evaluation REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_archived_change('run_id');
CREATE TRIGGER archived_weight_transfer_insert AFTER INSERT ON rft.weight_transfer REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_archived_change('run_id');
CREATE TRIGGER archived_operator_run_insert AFTER INSERT ON rft.operator_run REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_archived_change('run_id');
CREATE TRIGGER archived_write_receipt_insert AFTER INSERT ON rft.write_receipt REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_archived_change('run_id');
CREATE TRIGGER archived_group_origin_insert AFTER INSERT ON rft.group_origin REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_archived_change('run_id');
CREATE TRIGGER archived_experience_origin_insert AFTER INSERT ON rft.experience_origin REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_archived_change('experience_id');
CREATE TRIGGER archived_import_file_insert AFTER INSERT ON rft.import_file REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_archived_change('run_id');
