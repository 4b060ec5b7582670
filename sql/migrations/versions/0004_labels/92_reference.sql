-- References without a foreign key: those of the tables that schemas 0003 and 0004 add, too.

CREATE OR REPLACE FUNCTION rft.unenforced_references() RETURNS TABLE (child text, referring text, parent text, key text)
LANGUAGE sql IMMUTABLE
AS $$
    VALUES
        ('annotation', 'group_id', 'rollout_group', 'group_id'),
        ('annotation', 'label_batch_id', 'label_batch', 'label_batch_id'),
        ('annotation', 'supersedes', 'annotation', 'annotation_id'),
        ('annotation', 'restores', 'annotation', 'annotation_id'),
        ('attempt_history', 'history_id', 'run_attempt', 'attempt_id'),
        ('attempt_history', 'attempt_id', 'run_attempt', 'attempt_id'),
        ('comment', 'group_id', 'rollout_group', 'group_id'),
        ('draw', 'attempt_id', 'run_attempt', 'attempt_id'),
        ('draw', 'experience_id', 'experience', 'experience_id'),
        ('draw', 'pair_id', 'preference_pair', 'pair_id'),
        ('edited_response', 'experience_id', 'experience', 'experience_id'),
        ('edited_response', 'annotation_id', 'annotation', 'annotation_id'),
        ('evaluation_answer', 'evaluation_id', 'evaluation', 'evaluation_id'),
        ('evaluation_answer', 'task_id', 'task', 'task_id'),
        ('experience', 'run_id', 'run', 'run_id'),
        ('experience', 'group_id', 'rollout_group', 'group_id'),
        ('experience', 'rollout_id', 'rollout', 'rollout_id'),
        ('experience', 'parent_id', 'experience', 'experience_id'),
        ('experience', 'policy_version_min', 'policy_version', 'policy_version_id'),
        ('experience', 'policy_version_max', 'policy_version', 'policy_version_id'),
        ('experience_origin', 'experience_id', 'experience', 'experience_id'),
        ('group_baseline', 'group_id', 'rollout_group', 'group_id'),
        ('group_origin', 'group_id', 'rollout_group', 'group_id'),
        ('group_prompt', 'group_id', 'rollout_group', 'group_id'),
        ('label', 'experience_id', 'experience', 'experience_id'),
        ('label', 'label_batch_id', 'label_batch', 'label_batch_id'),
        ('operator_run', 'run_id', 'run', 'run_id'),
        ('partial_tokens', 'group_id', 'rollout_group', 'group_id'),
        ('preference_pair', 'chosen_id', 'experience', 'experience_id'),
        ('preference_pair', 'rejected_id', 'experience', 'experience_id'),
        ('purged_experience', 'experience_id', 'experience', 'experience_id'),
        ('purged_experience', 'purge_id', 'purge', 'purge_id'),
        ('question', 'group_id', 'rollout_group', 'group_id'),
        ('review', 'experience_id', 'experience', 'experience_id'),
        ('review', 'group_id', 'rollout_group', 'group_id'),
        ('review', 'reward_label_id', 'label', 'label_id'),
        ('rollout', 'group_id', 'rollout_group', 'group_id'),
        ('rollout_group', 'run_id', 'run', 'run_id'),
        ('rollout_group', 'task_id', 'task', 'task_id'),
        ('run', 'current_attempt_id', 'run_attempt', 'attempt_id'),
        ('run_attempt', 'from_checkpoint_id', 'checkpoint', 'checkpoint_id'),
        ('score', 'experience_id', 'experience', 'experience_id'),
        ('segment', 'file_id', 'segment_file', 'file_id'),
        ('task', 'task_verdict_id', 'task_verdict', 'task_verdict_id'),
        ('task_embedding', 'task_id', 'task', 'task_id'),
        ('task_observation', 'run_id', 'run', 'run_id'),
        ('task_observation', 'task_id', 'task', 'task_id'),
        ('task_score', 'task_id', 'task', 'task_id'),
        ('task_stat', 'run_id', 'run', 'run_id'),
        ('task_stat', 'task_id', 'task', 'task_id'),
        ('task_verdict', 'task_id', 'task', 'task_id'),
        ('turn_reward', 'experience_id', 'experience', 'experience_id'),
        ('verdict', 'experience_id', 'experience', 'experience_id'),
        ('verdict', 'group_id', 'rollout_group', 'group_id'),
        ('worker_span', 'worker_id', 'worker', 'worker_id'),
        ('worklist', 'run_id', 'run', 'run_id')
$$;

-- As before, for the tables that the account may read.
CREATE OR REPLACE FUNCTION rft.broken_references() RETURNS TABLE (child text, referring text, parent text, num_rows bigint, first_key bigint)
LANGUAGE plpgsql STABLE SET enable_nestloop = off
AS $$
DECLARE
    r record;
BEGIN
    FOR r IN SELECT u.* FROM rft.unenforced_references() u WHERE has_table_privilege(format('rft.%I', u.child), 'SELECT') LOOP
        RETURN QUERY EXECUTE format(
            'SELECT %1$L, %2$L, %3$L, count(*), min(c.%2$I)::bigint FROM rft.%1$I c'
            ' WHERE c.%2$I IS NOT NULL AND NOT EXISTS (SELECT FROM rft.%3$I p WHERE p.%4$I = c.%2$I) HAVING count(*) > 0',
            r.child, r.referring, r.parent, r.key);
    END LOOP;
END
$$;
COMMENT ON FUNCTION rft.broken_references() IS 'Returns how many rows of each table that the account may read refer to what does not exist, and the least of the missing keys.';
