-- Evaluations with several answers to a question, each with all that a rollout has; and runs that only evaluate.

ALTER TYPE rft.run_mode ADD VALUE 'eval';
COMMENT ON TYPE rft.run_mode IS 'both: explorer, pipeline and trainer; explore: no trainer; train: from stored experiences, no explorer; eval: evaluations of one model alone.';

ALTER TABLE rft.policy_version DROP CONSTRAINT policy_version_method_check,
    ADD CONSTRAINT policy_version_method_check CHECK (method IN ('memory', 'checkpoint', 'nccl', 'unchanged', 'folder'));
COMMENT ON COLUMN rft.policy_version.method IS 'How it is transferred: memory (file in shared memory), checkpoint (file on disk), nccl (from the trainer into live engines), unchanged (a skipped step: same bytes as before), or folder (a model with which the engines start, in a run that only evaluates).';
COMMENT ON COLUMN rft.policy_version.checksum IS 'xxh3-64 of the file''s bytes, hexadecimal; of weights that went into live engines, of the hashes of their tensors; of a folder, of its files with weights. Empty until they have.';

ALTER TABLE rft.evaluation ADD COLUMN num_answers integer NOT NULL DEFAULT 1 CHECK (num_answers >= 1);
COMMENT ON COLUMN rft.evaluation.num_answers IS 'Number of answers to each question.';
COMMENT ON COLUMN rft.evaluation.mean_reward IS 'Mean reward over all answers; NULL until it is done.';

ALTER TABLE rft.evaluation_answer
    ADD COLUMN answer_index integer NOT NULL DEFAULT 0 CHECK (answer_index >= 0),
    ADD COLUMN outcome rft.rollout_outcome NOT NULL DEFAULT 'ok',
    ADD COLUMN stop_reason rft.stop_reason,
    ADD COLUMN num_turns integer NOT NULL DEFAULT 1 CHECK (num_turns >= 0),
    ADD COLUMN seconds double precision CHECK (seconds >= 0),
    ADD COLUMN reward_parts jsonb NOT NULL DEFAULT '{}',
    ADD COLUMN metrics jsonb NOT NULL DEFAULT '{}',
    ADD COLUMN chats jsonb NOT NULL DEFAULT '[]';
UPDATE rft.evaluation_answer SET outcome = 'failed' WHERE error IS NOT NULL;
ALTER TABLE rft.evaluation_answer
    DROP CONSTRAINT evaluation_answer_pkey,
    ADD PRIMARY KEY (evaluation_id, task_id, answer_index);
COMMENT ON TABLE rft.evaluation_answer IS 'One answer to a question of an evaluation, with its rollout; comparisons are paired by task. Stored while the evaluation is answered, and counted once it is done.';
COMMENT ON COLUMN rft.evaluation_answer.reward IS 'Reward of the answer; 0 if it failed.';
COMMENT ON COLUMN rft.evaluation_answer.error IS 'The exception of a failed rollout; NULL if it succeeded.';
COMMENT ON COLUMN rft.evaluation_answer.answer_index IS 'Its place among the answers to the question, from 0.';
COMMENT ON COLUMN rft.evaluation_answer.outcome IS 'How its rollout ended. Before schema 0003: ok or failed.';
COMMENT ON COLUMN rft.evaluation_answer.stop_reason IS 'The limit that ended its rollout; NULL if its workflow ended it, or it failed.';
COMMENT ON COLUMN rft.evaluation_answer.num_turns IS 'Number of turns of its rollout. 1 for answers of before schema 0003.';
COMMENT ON COLUMN rft.evaluation_answer.seconds IS 'Wall time of its rollout, in seconds; NULL for answers of before schema 0003.';
COMMENT ON COLUMN rft.evaluation_answer.reward_parts IS 'The reward''s parts by function name.';
COMMENT ON COLUMN rft.evaluation_answer.metrics IS 'Numbers that the workflow or reward recorded.';
COMMENT ON COLUMN rft.evaluation_answer.chats IS 'The chats of its rollout, one for each branch: messages, fork, role, finish_reason, and turns with turn, num_tokens and step_reward. Empty for answers of before schema 0003.';

CREATE VIEW rft.v_evaluation_answer AS
SELECT e.evaluation_id, r.name AS run, e.run_id, e.purpose, e.taskset, t.task_key, e.decoding, e.trainer_step, e.policy_version_id, e.uri, e.checksum,
       e.status, a.task_id, a.answer_index, e.num_answers, t.payload -> 'prompt' AS prompt, t.payload ->> 'answer' AS answer, a.response, a.reward,
       a.reward_parts, a.metrics, a.outcome, a.stop_reason, a.error, a.num_turns, a.num_response_tokens, a.finish_reason, a.seconds,
       a.chats -> -1 -> 'messages' AS messages, a.chats
FROM rft.evaluation_answer a
JOIN rft.evaluation e USING (evaluation_id)
JOIN rft.run r USING (run_id)
LEFT JOIN rft.task t USING (task_id);
COMMENT ON VIEW rft.v_evaluation_answer IS 'The answers of evaluations with their run, question, rollout and chat (messages: that of the last branch), and with the checksum of the weights that gave them.';

-- As in schema 0002, with the texts that answers have now.
CREATE OR REPLACE FUNCTION rft.purge_tasks(of_tasks bigint[], of_purge bigint) RETURNS void
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
    UPDATE rft.evaluation_answer
    SET response = '[purged]', error = CASE WHEN error IS NOT NULL THEN '[purged]' END, chats = '[]', reward_parts = rft.numbers_of(reward_parts),
        metrics = rft.numbers_of(metrics)
    WHERE task_id = ANY (of_tasks);
    UPDATE rft.evaluation SET error = split_part(error, '; the first: ', 1) WHERE evaluation_id = ANY (answered) AND status = 'done' AND error IS NOT NULL;
    UPDATE rft.evaluation SET error = '[purged]' WHERE taskset = ANY (sets) AND status = 'failed' AND error IS NOT NULL;
END
$$;
