-- Rights. Roles belong to the whole server, not to one database. An account that may not create roles can still migrate,
-- and an administrator runs `SELECT rft.create_roles()` or `rft db roles` later.

CREATE FUNCTION rft.create_roles() RETURNS text[]
LANGUAGE plpgsql
AS $$
DECLARE
    wanted text;
    made text[] := '{}';
BEGIN
    FOREACH wanted IN ARRAY ARRAY['rft_reader', 'rft_labeler', 'rft_worker'] LOOP
        IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = wanted) THEN
            BEGIN
                EXECUTE format('CREATE ROLE %I NOLOGIN', wanted);
                made := made || wanted;
            EXCEPTION
                WHEN duplicate_object OR unique_violation THEN NULL;  -- another database of this server created it at the same moment
                WHEN insufficient_privilege THEN NULL;
            END;
        END IF;
    END LOOP;
    RETURN made;
END
$$;
COMMENT ON FUNCTION rft.create_roles() IS 'Creates the missing roles of rft_reader, rft_labeler and rft_worker, if the caller has the right; returns the created ones.';

-- Idempotent; runs after every migration, to cover new tables, and after a restore, which brings no rights. Everything not named
-- here remains the owner's: migrations, purges, roles.
CREATE FUNCTION rft.grant_roles() RETURNS text[]
LANGUAGE plpgsql
AS $$
DECLARE
    held text[] := (SELECT coalesce(array_agg(rolname::text ORDER BY rolname), '{}') FROM pg_roles
                    WHERE rolname IN ('rft_reader', 'rft_labeler', 'rft_worker'));
    -- Tables whose rows a worker writes once and never changes.
    append_only CONSTANT text[] := ARRAY['verdict', 'task_verdict', 'operator_run', 'write_receipt', 'evaluation_answer', 'attempt_history',
                                         'group_origin', 'experience_origin', 'preference_pair', 'group_prompt', 'group_baseline', 'run_model'];
    role text;
    relation record;
BEGIN
    REVOKE ALL ON FUNCTION rft.purge_texts(bigint[], bigint, boolean) FROM PUBLIC;
    REVOKE ALL ON FUNCTION rft.lock_purged(bigint[]) FROM PUBLIC;
    REVOKE ALL ON FUNCTION rft.lock_labels() FROM PUBLIC;
    REVOKE ALL ON FUNCTION rft.analyze_worklist() FROM PUBLIC;
    REVOKE ALL ON FUNCTION rft.lock_groups_and_reviews(bigint[]) FROM PUBLIC;
    REVOKE ALL ON FUNCTION rft.create_roles() FROM PUBLIC;
    REVOKE ALL ON FUNCTION rft.grant_roles() FROM PUBLIC;

    FOREACH role IN ARRAY held LOOP
        EXECUTE format('REVOKE ALL ON ALL TABLES IN SCHEMA rft FROM %I', role);
        EXECUTE format('REVOKE ALL ON ALL SEQUENCES IN SCHEMA rft FROM %I', role);
        EXECUTE format('GRANT USAGE ON SCHEMA rft TO %I', role);
        EXECUTE format('GRANT SELECT ON ALL TABLES IN SCHEMA rft TO %I', role);
    END LOOP;
    IF 'rft_labeler' = ANY (held) THEN
        GRANT UPDATE (reward, reward_final) ON rft.experience TO rft_labeler;
        GRANT USAGE ON SEQUENCE rft.label_batch_id_seq TO rft_labeler;
        -- A person's preference between two answers; source and time are not theirs to set.
        GRANT INSERT (chosen_id, rejected_id, author, margin) ON rft.preference_pair TO rft_labeler;
        -- A person's answer to a question.
        GRANT UPDATE (answer) ON rft.review TO rft_labeler;
        GRANT EXECUTE ON FUNCTION rft.lock_groups_and_reviews(bigint[]) TO rft_labeler;
    END IF;
    IF 'rft_worker' = ANY (held) THEN
        FOR relation IN
            SELECT c.relname FROM pg_class c
            WHERE c.relnamespace = 'rft'::regnamespace AND c.relkind IN ('r', 'p')
              AND c.relname NOT IN ('schema_version', 'buffer', 'experience', 'label', 'rollout', 'purge', 'purged_experience', 'retired_range',
                                'archive', 'archive_file', 'archived_segment')
        LOOP
            EXECUTE format('GRANT %s ON rft.%I TO rft_worker',
                           CASE WHEN relation.relname = ANY (append_only) THEN 'INSERT' ELSE 'INSERT, UPDATE' END, relation.relname);
        END LOOP;
        GRANT INSERT ON rft.experience, rft.rollout TO rft_worker;
        GRANT UPDATE (is_newest) ON rft.verdict TO rft_worker;
        GRANT UPDATE (reward, reward_final) ON rft.experience TO rft_worker;
        -- Rows that are deleted because they never counted (finished items, undone draws, unanswered questions), and
        -- the sampler's policy and going back, which are written again.
        GRANT DELETE ON rft.worklist, rft.draw, rft.evaluation, rft.sampler_lane, rft.sampler_insert, rft.sampler_step,
            rft.selector_snapshot, rft.selector_state, rft.partial_tokens TO rft_worker;
        GRANT USAGE ON ALL SEQUENCES IN SCHEMA rft TO rft_worker;
        GRANT EXECUTE ON FUNCTION rft.lock_labels(), rft.analyze_worklist(), rft.lock_groups_and_reviews(bigint[]) TO rft_worker;
    END IF;
    RETURN held;
END
$$;
COMMENT ON FUNCTION rft.grant_roles() IS 'Grants rft_reader, rft_labeler and rft_worker exactly their rights, if they exist; returns the existing ones.';

SELECT rft.create_roles();
