-- Rights: what schemas 0003 and 0004 add. One place for all their tables and functions. They are granted when all migrations have run.

CREATE OR REPLACE FUNCTION rft.worker_rights() RETURNS TABLE (table_name text, may_insert boolean, may_delete boolean, may_update text[])
LANGUAGE sql IMMUTABLE
AS $$
    VALUES
        ('attempt_history', true, false, '{}'::text[]),
        ('batch', true, true, '{}'),
        ('checkpoint', true, false, '{deleted_at}'),
        -- Rows that are deleted because they never counted: finished items, undone draws, unanswered questions.
        ('draw', true, true, '{times_sampled}'),
        ('edited_response', true, false, '{}'),
        ('endpoint_usage', true, false, '{num_calls, num_tokens, cost, updated_at}'),
        ('evaluation', true, true, '{policy_version_id, status, claimed_by, lease_until, num_lost, num_tasks, mean_reward, seconds, error, finished_at}'),
        ('evaluation_answer', true, true, '{}'),
        ('experience', true, false, '{reward, reward_final}'),
        ('experience_origin', true, false, '{}'),
        ('shared_device', true, false, '{holder, wanted_by, since}'),
        ('gold', true, false, '{}'),
        ('gold_rate', true, false, '{rate}'),
        ('group_baseline', true, false, '{}'),
        ('group_origin', true, false, '{}'),
        ('group_prompt', true, false, '{}'),
        ('import_file', true, false, '{digest, started_at, finished_at}'),
        ('label_kind', true, false, '{retired_at}'),
        ('lock', true, false, '{holder, pid, key, taken_at}'),
        ('operator_run', true, false, '{}'),
        ('partial_tokens', true, true, '{*}'),
        ('pipeline', true, false, '{digest}'),
        ('policy_version', true, false, '{uri, checksum, num_bytes}'),
        ('preference_pair', true, false, '{}'),
        ('review', true, false, '{answer}'),
        ('question', true, false, '{priority, wanted, deadline, is_open, is_gold}'),
        ('role_baseline', true, false, '{}'),
        ('rollout', true, false, '{}'),
        ('rollout_group', true, false, '{status, trainable, closed_reason, aged_out, claimed_by, claim_token, claimed_policy_step, lease_until, num_lost, sealed_at, ready_at, decided_by, left_by}'),
        ('run', true, false, '{status, config, planned_steps, pipeline_version, current_attempt_id, stop_requested, outcome, source_sql, source_kind, source_rows, source_hash, source_epochs, source_weighted, label_cut, finished_at}'),
        ('run_attempt', true, false, '{lease_until, ended_at, outcome}'),
        ('run_model', true, false, '{}'),
        ('sampler', true, false, '{*}'),
        ('sampler_insert', true, true, '{}'),
        ('sampler_lane', true, true, '{}'),
        ('sampler_step', true, true, '{}'),
        ('score', true, false, '{scores, error, input_digest, scored_at}'),
        ('segment', true, false, '{file_id, offset_bytes, length_bytes, checksum}'),
        ('segment_file', true, false, '{size_bytes, closed_at, retired_at, removed_at}'),
        ('selector_snapshot', true, true, '{}'),
        ('selector_state', true, true, '{*}'),
        ('task', true, false, '{task_key, payload, features, manual_features, source_payload, source_features, status, task_verdict_id, left_source_at}'),
        ('task_embedding', true, false, '{text_digest, embedding, embedded_at}'),
        ('task_observation', true, false, '{applied, applied_in, applied_seq}'),
        ('task_score', true, false, '{scores, error, input_digest, scored_at}'),
        ('task_stat', true, false, '{alpha, beta, attempts, mean_reward, last_selected_at}'),
        ('task_verdict', true, false, '{}'),
        ('taskset', true, false, '{*}'),
        ('train_step', true, false, '{}'),
        ('turn_reward', true, false, '{reward}'),
        ('verdict', true, false, '{is_newest}'),
        ('weight_receipt', true, false, '{status, first_rank, group_id, pause_seconds, error, ended_at}'),
        ('weight_receiver', true, false, '{*}'),
        ('weight_transfer', true, false, '{status, group_id, backend, address, num_ranks, dtype, in_float32, bucket_bytes, num_bytes, send_seconds, error, sent_at, ended_at}'),
        ('worker', true, false, '{state, waiting_for, progress, started_at, heartbeat_at, stopped_at, error, crashed}'),
        ('worker_span', true, false, '{ended_at}'),
        ('worklist', true, true, '{*}'),
        ('write_receipt', true, false, '{}')
$$;

CREATE OR REPLACE FUNCTION rft.grant_roles() RETURNS text[]
LANGUAGE plpgsql
AS $$
DECLARE
    held text[] := (SELECT coalesce(array_agg(rolname::text ORDER BY rolname), '{}') FROM pg_roles
                    WHERE rolname IN ('rft_reader', 'rft_labeler', 'rft_worker'));
    -- Functions that write, but only with the owner's rights.
    owners_only CONSTANT text[] := ARRAY[
        'create_roles', 'grant_roles', 'purge_texts', 'purge_outcomes', 'purge_tasks', 'purge_errors', 'purge_annotations', 'purge_comments', 'lock_purged', 'correct_verdicts',
        'own_label_batch', 'lock_annotated', 'lock_annotated_group', 'import_annotations', 'import_comments', 'link_imported_edits', 'fill_undo', 'check_annotation', 'lease_questions', 'lease_gold'];
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
    -- Row security asks them in every session.
    FOREACH role IN ARRAY held LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION rft.has_annotated(text, bigint), rft.may_see_comment(bigint), rft.has_questions(text),'
            ' rft.known_answers() TO %I', role);
        -- Row security hides their rows, and EXPLAIN ANALYZE counts the hidden ones: a target with a known answer would be recognised.
        IF role <> 'rft_worker' THEN
            EXECUTE format('REVOKE SELECT ON rft.gold, rft.gold_rate, rft.question FROM %I', role);
        END IF;
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
    -- A label of any kind, a comment, and the queue of questions. Id, account, batch and time are set by the database.
    FOREACH role IN ARRAY held LOOP
        IF role <> 'rft_reader' THEN
            EXECUTE format('GRANT EXECUTE ON FUNCTION rft.claim_questions(text, integer, bigint, bigint[]), rft.renew_questions(bigint[]),'
                ' rft.release_questions(bigint[]), rft.skip_question(bigint), rft.unskip_question(bigint), rft.skipped_questions(text, bigint) TO %I', role);
            EXECUTE format('GRANT INSERT (kind, kind_version, target_id, value, source, author, model, confidence, reason, shown, seconds, supersedes,'
                ' restores, retracted, key) ON rft.annotation TO %I', role);
            EXECUTE format('GRANT INSERT (target, target_id, kind, comment, author, key) ON rft.comment TO %I', role);
        END IF;
    END LOOP;
    IF 'rft_labeler' = ANY (held) THEN
        GRANT UPDATE (reward, reward_final) ON rft.experience TO rft_labeler;
        GRANT UPDATE (reward) ON rft.turn_reward TO rft_labeler;
        -- A person's preference between two answers; source and time are not theirs to set.
        GRANT INSERT (chosen_id, rejected_id, author, margin) ON rft.preference_pair TO rft_labeler;
        -- A person's answer to a question.
        GRANT UPDATE (answer) ON rft.review TO rft_labeler;
        -- A query to keep; its account is not theirs to set.
        GRANT INSERT (kind, name, query, author), UPDATE (removed_at) ON rft.saved_query TO rft_labeler;
        GRANT EXECUTE ON FUNCTION rft.lock_groups_and_reviews(bigint[]), rft.begin_label_batches(integer),
            rft.label_rollout(bigint, double precision, boolean), rft.lock_annotations(text[], bigint[]), rft.undo_annotation_rows(bigint[], text),
            rft.undo_annotations(bigint, text), rft.undo_annotation_of_key(text, text) TO rft_labeler;
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
            rft.begin_label_batches(integer), rft.compact_task_changes(text), rft.lock_annotations(text[], bigint[]),
            rft.copy_annotations(bigint[]) TO rft_worker;
    END IF;
    RETURN held;
END
$$;
