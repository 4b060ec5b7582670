-- Purges reach what is stored about a purged text elsewhere, and record what they have reached, so that work in flight is checked when it commits.
-- docs/decisions/0045 lists every path on which such text is written, and the rule for it.

ALTER TABLE rft.purge
    ADD COLUMN run_ids bigint[] NOT NULL DEFAULT '{}',
    ADD COLUMN tasksets text[] NOT NULL DEFAULT '{}',
    ADD COLUMN purged_at timestamptz;
COMMENT ON COLUMN rft.purge.run_ids IS 'Runs whose processes may have seen what was purged. Errors that these report later are not stored. Only of requests, and empty for purges before schema 0002.';
COMMENT ON COLUMN rft.purge.tasksets IS 'Tasksets of purged tasks, for the errors of evaluations.';
COMMENT ON COLUMN rft.purge.purged_at IS 'When texts were last removed; NULL before the first, and for purges before schema 0002.';

CREATE FUNCTION rft.was_purged_since(of_run bigint, of_taskset text, since timestamptz) RETURNS boolean
LANGUAGE sql STABLE
AS $$
    SELECT EXISTS (SELECT FROM rft.purge p WHERE p.purged_at > since AND (of_run = ANY (p.run_ids) OR of_taskset = ANY (p.tasksets)))
$$;
COMMENT ON FUNCTION rft.was_purged_since(bigint, text, timestamptz) IS 'Returns whether a request purged experiences of a run, or tasks of a taskset, after a time, so that an error of work from before may quote them.';

CREATE FUNCTION rft.numbers_of(named jsonb) RETURNS jsonb
LANGUAGE sql IMMUTABLE
AS $$
    SELECT coalesce(jsonb_object_agg(key, value), '{}') FROM jsonb_each(named) WHERE jsonb_typeof(value) IN ('number', 'boolean')
$$;
COMMENT ON FUNCTION rft.numbers_of(jsonb) IS 'Returns the numbers of an object without its texts.';

-- A purged row has no text that a pipeline could judge and no arrays to train on, so its groups are abandoned. All its numbers stay. This
-- function does not touch arrays: rftdata.maintenance.purge first writes the segments again and calls it in the transaction that
-- repoints them.
CREATE OR REPLACE FUNCTION rft.purge_texts(ids bigint[], of_purge bigint, tasks_too boolean) RETURNS bigint
LANGUAGE plpgsql
AS $$
DECLARE
    groups bigint[];
    tasks bigint[];
    purged bigint;
BEGIN
    PERFORM set_config('rft.purge', of_purge::text, true);
    PERFORM FROM rft.lock_purged(ids);
    SELECT array_agg(DISTINCT group_id) INTO groups FROM rft.experience WHERE experience_id = ANY (ids);

    INSERT INTO rft.purged_experience (experience_id, purge_id, segment_id, segment_row)
    SELECT experience_id, of_purge, segment_id, segment_row FROM rft.experience WHERE experience_id = ANY (ids)
    ON CONFLICT DO NOTHING;
    GET DIAGNOSTICS purged = ROW_COUNT;

    -- A prompt stays for as long as an experience that is not purged has it.
    INSERT INTO rft.group_prompt (group_id, prompt_digest, prompt) SELECT unnest(groups), '', '[purged]' ON CONFLICT DO NOTHING;
    UPDATE rft.experience
    SET prompt_digest = '', response = '[purged]', response_messages = NULL, reward_parts = rft.numbers_of(reward_parts), metrics = rft.numbers_of(metrics)
    WHERE experience_id = ANY (ids);
    DELETE FROM rft.group_prompt p
    WHERE p.group_id = ANY (groups)
      AND NOT EXISTS (SELECT FROM rft.experience e WHERE e.group_id = p.group_id AND e.prompt_digest = p.prompt_digest OFFSET 0);

    PERFORM rft.purge_outcomes(groups, of_purge);
    IF tasks_too THEN
        SELECT array_agg(DISTINCT task_id) INTO tasks FROM rft.rollout_group WHERE group_id = ANY (groups);
        PERFORM rft.purge_tasks(tasks, of_purge);
    END IF;
    PERFORM rft.purge_errors(groups, coalesce(tasks, '{}'), of_purge);
    PERFORM set_config('rft.purge', '', true);
    RETURN purged;
END
$$;
COMMENT ON FUNCTION rft.purge_texts(bigint[], bigint, boolean) IS 'Removes the texts of experiences, and of their tasks if asked for, and abandons their groups. Returns how many had not been purged before.';

-- Results may quote any text of their group, and a question its experience.
CREATE FUNCTION rft.purge_outcomes(groups bigint[], of_purge bigint) RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
    -- The greedy rollout answers the same prompt.
    UPDATE rft.group_baseline
    SET response = '[purged]', messages = NULL, error = CASE WHEN error IS NOT NULL THEN '[purged]' END, reward_parts = rft.numbers_of(reward_parts)
    WHERE group_id = ANY (groups);
    -- The error of a rollout stays only with a turn that is not purged.
    UPDATE rft.rollout o SET error = '[purged]'
    WHERE o.group_id = ANY (groups) AND o.error IS NOT NULL AND NOT EXISTS (
        SELECT FROM rft.experience e WHERE e.group_id = o.group_id AND e.rollout_id = o.rollout_id
            AND NOT EXISTS (SELECT FROM rft.purged_experience x WHERE x.experience_id = e.experience_id));
    DELETE FROM rft.partial_tokens WHERE group_id = ANY (groups);

    DELETE FROM rft.worklist w USING rft.rollout_group g
    WHERE g.group_id = ANY (groups) AND w.item_kind = 'group' AND w.item_id = g.group_id AND w.run_id = g.run_id AND w.consumer = 'pipeline';
    UPDATE rft.worklist w SET available = false, resume_step = NULL FROM rft.rollout_group g
    WHERE g.group_id = ANY (groups) AND w.item_kind = 'group' AND w.item_id = g.group_id AND w.run_id = g.run_id AND w.consumer = 'trainer';
    UPDATE rft.rollout_group SET status = 'abandoned', trainable = false, aged_out = false, lease_until = NULL,
        closed_reason = (SELECT 'purged: ' || reason FROM rft.purge WHERE purge_id = of_purge)
    WHERE group_id = ANY (groups);

    -- Open questions are no longer shown, since the group is abandoned.
    UPDATE rft.verdict SET reason = '[purged]' WHERE group_id = ANY (groups) AND reason IS NOT NULL;
    UPDATE rft.score s SET error = CASE WHEN s.error IS NOT NULL THEN '[purged]' END, scores = rft.numbers_of(s.scores)
    FROM rft.experience e WHERE e.group_id = ANY (groups) AND s.experience_id = e.experience_id;
    UPDATE rft.review v SET question = '[purged]'
    WHERE v.group_id = ANY (groups) AND EXISTS (SELECT FROM rft.purged_experience x WHERE x.experience_id = v.experience_id);
END
$$;
COMMENT ON FUNCTION rft.purge_outcomes(bigint[], bigint) IS 'Abandons groups, and removes what rollouts, stages and questions say about their texts.';

CREATE FUNCTION rft.purge_tasks(of_tasks bigint[], of_purge bigint) RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    sets text[];
    answered bigint[];
BEGIN
    -- A transaction that plans, answers or decides on a task locks its row FOR KEY SHARE, or more strongly, before it commits.
    PERFORM FROM rft.task WHERE task_id = ANY (of_tasks) ORDER BY task_id FOR UPDATE;
    SELECT array_agg(DISTINCT taskset) INTO sets FROM rft.task WHERE task_id = ANY (of_tasks);
    -- Explorers that hold a group of them lose their claims, so a late answer is refused.
    PERFORM FROM rft.rollout_group WHERE task_id = ANY (of_tasks) AND status IN ('planned', 'claimed') ORDER BY group_id FOR UPDATE;
    -- A group stays if it has an experience that was not purged.
    PERFORM rft.purge_outcomes(ARRAY(
        SELECT g.group_id FROM rft.rollout_group g WHERE g.task_id = ANY (of_tasks) AND NOT EXISTS (
            SELECT FROM rft.experience e WHERE e.group_id = g.group_id
                AND NOT EXISTS (SELECT FROM rft.purged_experience x WHERE x.experience_id = e.experience_id))), of_purge);

    UPDATE rft.task SET payload = '{"purged": true}', features = '{}', source_payload = NULL, source_features = NULL, status = 'excluded'
    WHERE task_id = ANY (of_tasks);
    UPDATE rft.task_verdict
    SET reason = CASE WHEN reason IS NOT NULL THEN '[purged]' END, features = '{}', prompt = CASE WHEN prompt IS NOT NULL THEN '[purged]' END,
        answer = CASE WHEN answer IS NOT NULL THEN '[purged]' END
    WHERE task_id = ANY (of_tasks);
    DELETE FROM rft.task_score WHERE task_id = ANY (of_tasks);
    DELETE FROM rft.task_embedding WHERE task_id = ANY (of_tasks);

    -- A failed answer keeps an error, and an evaluation the number of its failed answers, because scores depend on them.
    PERFORM FROM rft.evaluation WHERE taskset = ANY (sets) ORDER BY evaluation_id FOR UPDATE;
    answered := ARRAY(SELECT DISTINCT evaluation_id FROM rft.evaluation_answer WHERE task_id = ANY (of_tasks) AND error IS NOT NULL);
    UPDATE rft.evaluation_answer SET response = '[purged]', error = CASE WHEN error IS NOT NULL THEN '[purged]' END
    WHERE task_id = ANY (of_tasks);
    UPDATE rft.evaluation SET error = split_part(error, '; the first: ', 1) WHERE evaluation_id = ANY (answered) AND status = 'done' AND error IS NOT NULL;
    UPDATE rft.evaluation SET error = '[purged]' WHERE taskset = ANY (sets) AND status = 'failed' AND error IS NOT NULL;
END
$$;
COMMENT ON FUNCTION rft.purge_tasks(bigint[], bigint) IS 'Removes the texts of tasks and of the answers to them in evaluations, and abandons their groups that have no other experience.';

-- These errors name no experience, so all are removed that may quote one. Work that fails later finds the purge by was_purged_since.
CREATE FUNCTION rft.purge_errors(groups bigint[], of_tasks bigint[], of_purge bigint) RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    runs bigint[] := ARRAY(SELECT DISTINCT run_id FROM rft.rollout_group WHERE group_id = ANY (groups) OR task_id = ANY (of_tasks));
    sets text[] := ARRAY(SELECT DISTINCT taskset FROM rft.task WHERE task_id = ANY (of_tasks));
BEGIN
    UPDATE rft.operator_run o SET error = '[purged]'
    FROM (SELECT run_id, min(coalesce(sealed_at, planned_at)) AS since FROM rft.rollout_group WHERE group_id = ANY (groups) GROUP BY run_id) r
    WHERE o.run_id = r.run_id AND o.ran_at >= r.since AND o.error IS NOT NULL;
    UPDATE rft.operator_run SET error = '[purged]' WHERE error IS NOT NULL AND taskset = ANY (sets);

    UPDATE rft.purge p SET purged_at = clock_timestamp(),
        run_ids = ARRAY(SELECT DISTINCT i.id FROM unnest(p.run_ids || runs) i (id) ORDER BY 1),
        tasksets = ARRAY(SELECT DISTINCT i.name FROM unnest(p.tasksets || sets) i (name) ORDER BY 1)
    WHERE p.purge_id = of_purge AND p.kind = 'request';
    IF FOUND THEN
        PERFORM FROM rft.worker WHERE run_id = ANY (runs) ORDER BY worker_id FOR UPDATE;
        -- What a process waits for may quote an error after a colon.
        UPDATE rft.worker SET error = CASE WHEN error <> 'the process is gone' THEN '[purged]' ELSE error END, waiting_for = split_part(waiting_for, ': ', 1)
        WHERE run_id = ANY (runs) AND (error <> 'the process is gone' OR waiting_for LIKE '%: %');
        UPDATE rft.run SET outcome = '[purged]' WHERE run_id = ANY (runs) AND status = 'failed' AND outcome IS NOT NULL;
    END IF;
END
$$;
COMMENT ON FUNCTION rft.purge_errors(bigint[], bigint[], bigint) IS 'Removes errors of stages, and for a request those of processes, that may quote texts of groups or tasks; records the runs and tasksets for errors to come.';
