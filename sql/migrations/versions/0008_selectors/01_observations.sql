-- Outcomes know in which plan selectors learned them, so that any process can learn them again in the same order; relabels and people
-- add to them; their fold is kept by triggers, whoever writes.

ALTER TABLE rft.task_observation
    ALTER COLUMN attempt_id DROP NOT NULL, ALTER COLUMN ordinal DROP NOT NULL, ALTER COLUMN kind DROP DEFAULT,
    ADD COLUMN applied_seq bigint, ADD COLUMN author text, ADD COLUMN reason text,
    ADD CONSTRAINT task_observation_has_its_group CHECK (kind IN ('manual', 'implicit') OR num_nulls(attempt_id, ordinal) = 0),
    ADD CONSTRAINT task_observation_is_finite CHECK (successes - trials BETWEEN -1e300 AND 1e300);
ALTER TABLE rft.task_observation ALTER COLUMN kind SET DEFAULT 'explicit';
CREATE INDEX task_observation_applied ON rft.task_observation (run_id, applied_seq) WHERE applied_seq IS NOT NULL;
COMMENT ON COLUMN rft.task_observation.attempt_id IS 'The attempt whose group it was; NULL for a person''s.';
COMMENT ON COLUMN rft.task_observation.ordinal IS 'The group''s ordinal in that attempt; NULL for a person''s.';
COMMENT ON COLUMN rft.task_observation.successes IS 'Sum of rewards clipped to [0, 1]; of a correction, by how much it changed.';
COMMENT ON COLUMN rft.task_observation.trials IS 'Rollouts with an outcome ok and a reward; of a correction, by how many they changed.';
COMMENT ON COLUMN rft.task_observation.applied IS 'Whether the run''s selector has seen it, or never will: the run has left its group.';
COMMENT ON COLUMN rft.task_observation.applied_seq IS 'The plan of the run, counted from 1, in which its selectors learned it; NULL: they have not.';
COMMENT ON COLUMN rft.task_observation.author IS 'Of manual ones and corrections: who says so.';
COMMENT ON COLUMN rft.task_observation.reason IS 'Of manual ones and corrections: why, where it was said.';

UPDATE rft.task_observation o SET applied_seq = n.seq
FROM (SELECT i.observation_id, dense_rank() OVER (PARTITION BY i.run_id ORDER BY coalesce(i.applied_in, 0)) AS seq
      FROM rft.task_observation i
      LEFT JOIN rft.rollout_group g ON g.run_id = i.run_id AND g.attempt_id = i.attempt_id AND g.ordinal = i.ordinal
      WHERE i.applied AND g.left_by IS NULL) n
WHERE n.observation_id = o.observation_id;

ALTER TABLE rft.selector_state ADD COLUMN metrics jsonb NOT NULL DEFAULT '{}';
COMMENT ON COLUMN rft.selector_state.metrics IS 'What the selector said of itself when it last chose.';

CREATE FUNCTION rft.refuse_observation_change() RETURNS trigger
LANGUAGE plpgsql
AS $$
BEGIN
    RAISE EXCEPTION 'rft.task_observation is append-only: % is refused', TG_OP
        USING ERRCODE = 'integrity_constraint_violation',
              DETAIL = 'Selectors have learned from it, and learn it again after a restart.',
              HINT = 'INSERT an observation of kind manual with the difference in successes and trials, or UPDATE rft.task_stat SET alpha = …, beta = ….';
END
$$;
COMMENT ON FUNCTION rft.refuse_observation_change() IS 'Trigger: outcomes are never changed; the error says what to do instead.';
CREATE TRIGGER observation_append_only
    BEFORE UPDATE OF observation_id, run_id, attempt_id, ordinal, task_id, kind, successes, trials, author, reason, observed_at
        OR DELETE OR TRUNCATE
    ON rft.task_observation FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_observation_change();

-- The fold, for whoever inserts. Outcomes of groups are folded at once; corrections and what people add when their transaction
-- commits: it may be that of a person who goes for lunch, and would keep those waiting who try the same task.
CREATE FUNCTION rft.fold_observations() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    INSERT INTO rft.task_stat AS s (run_id, task_id, alpha, beta, attempts, mean_reward)
    SELECT run_id, task_id, 1 + sum(successes), 1 + sum(trials - successes), count(*), sum(successes) / nullif(sum(trials), 0)
    FROM new_rows WHERE kind = 'explicit' GROUP BY run_id, task_id ORDER BY run_id, task_id
    ON CONFLICT (run_id, task_id) DO UPDATE
    SET alpha = s.alpha + excluded.alpha - 1, beta = s.beta + excluded.beta - 1, attempts = s.attempts + excluded.attempts,
        mean_reward = (s.alpha + excluded.alpha - 2) / nullif(s.alpha + s.beta + excluded.alpha + excluded.beta - 4, 0);
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION rft.fold_observations() IS 'Trigger: folds outcomes of groups into task_stat.';
CREATE TRIGGER observation_fold
    AFTER INSERT ON rft.task_observation REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION rft.fold_observations();

CREATE FUNCTION rft.fold_at_commit() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    INSERT INTO rft.task_stat AS s (run_id, task_id, alpha, beta, mean_reward)
    VALUES (NEW.run_id, NEW.task_id, 1 + NEW.successes, 1 + NEW.trials - NEW.successes, NEW.successes / nullif(NEW.trials, 0))
    ON CONFLICT (run_id, task_id) DO UPDATE
    SET alpha = s.alpha + excluded.alpha - 1, beta = s.beta + excluded.beta - 1,
        mean_reward = (s.alpha + excluded.alpha - 2) / nullif(s.alpha + s.beta + excluded.alpha + excluded.beta - 4, 0);
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION rft.fold_at_commit() IS 'Trigger: folds a correction, or what a person added, into task_stat when the transaction commits.';
-- The condition is evaluated at once, the function runs later.
CREATE CONSTRAINT TRIGGER observation_fold_later
    AFTER INSERT ON rft.task_observation DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW WHEN (NEW.kind <> 'explicit' AND coalesce(current_setting('rft.folding', true), '') <> 'done') EXECUTE FUNCTION rft.fold_at_commit();

-- A rollout succeeds as much as its turns do on average; a turn's reward that came or went is that much of a trial. Rows are found by
-- their keys, whatever the tables held when this was planned.
CREATE FUNCTION rft.correct_observations() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off SET enable_material = off SET enable_mergejoin = off
AS $$
BEGIN
    INSERT INTO rft.task_observation (run_id, attempt_id, ordinal, task_id, kind, successes, trials, author, reason)
    SELECT g.run_id, g.attempt_id, g.ordinal, g.task_id, 'correction', d.successes, d.trials,
           coalesce(nullif(current_setting('rft.author', true), ''), session_user), nullif(current_setting('rft.reason', true), '')
    FROM (
        SELECT c.group_id, sum(c.successes / t.num_turns) AS successes, sum(c.trials / t.num_turns) AS trials
        FROM (
            SELECT n.group_id, n.rollout_id,
                   coalesce(least(greatest(n.reward, 0), 1), 0) - coalesce(least(greatest(o.reward, 0), 1), 0) AS successes,
                   ((n.reward IS NOT NULL)::integer - (o.reward IS NOT NULL)::integer)::double precision AS trials
            FROM new_rows n JOIN old_rows o USING (experience_id) WHERE n.reward IS DISTINCT FROM o.reward) c
        CROSS JOIN LATERAL (SELECT greatest(num_turns, 1) AS num_turns FROM rft.rollout WHERE rollout_id = c.rollout_id OFFSET 0) t
        WHERE c.successes <> 0 OR c.trials <> 0
        GROUP BY c.group_id) d
    CROSS JOIN LATERAL (
        SELECT run_id, attempt_id, ordinal, task_id FROM rft.rollout_group WHERE group_id = d.group_id AND left_by IS NULL OFFSET 0) g
    WHERE d.successes <> 0 OR d.trials <> 0
    ORDER BY g.run_id, g.task_id;
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION rft.correct_observations() IS 'Trigger: what an UPDATE of rewards changes about the outcomes of tasks, as observations of kind correction.';
CREATE TRIGGER experience_observations
    AFTER UPDATE ON rft.experience REFERENCING OLD TABLE AS old_rows NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION rft.correct_observations();

-- What a person sets in the fold becomes an outcome of kind manual: otherwise no selector would learn it, and the next rebuild would
-- undo it. Our own folds come from triggers (depth 2) or say so.
CREATE FUNCTION rft.note_manual_stat() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    wrong bigint;
BEGIN
    IF pg_trigger_depth() > 1 OR current_setting('rft.folding', true) = 'rebuild' THEN
        RETURN NULL;
    END IF;
    SELECT n.task_id INTO wrong FROM new_rows n JOIN old_rows o USING (run_id, task_id)
    WHERE (n.attempts, n.mean_reward) IS DISTINCT FROM (o.attempts, o.mean_reward) OR NOT (n.alpha > 0 AND n.beta > 0) LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'rft.task_stat of task % would not be a fold of outcomes', wrong
            USING ERRCODE = 'integrity_constraint_violation',
                  DETAIL = 'attempts and mean_reward follow from the outcomes; alpha and beta are above 0.',
                  HINT = 'UPDATE rft.task_stat SET alpha = …, beta = … alone: it is noted as an outcome of kind manual.';
    END IF;
    PERFORM set_config('rft.folding', 'done', true);
    INSERT INTO rft.task_observation (run_id, task_id, kind, successes, trials, author, reason)
    SELECT n.run_id, n.task_id, 'manual', n.alpha - o.alpha, n.alpha - o.alpha + n.beta - o.beta,
           coalesce(nullif(current_setting('rft.author', true), ''), session_user), nullif(current_setting('rft.reason', true), '')
    FROM new_rows n JOIN old_rows o USING (run_id, task_id)
    WHERE (n.alpha, n.beta) IS DISTINCT FROM (o.alpha, o.beta);
    PERFORM set_config('rft.folding', '', true);
    UPDATE rft.task_stat s SET mean_reward = (s.alpha - 1) / nullif(s.alpha + s.beta - 2, 0)
    FROM new_rows n JOIN old_rows o USING (run_id, task_id)
    WHERE s.run_id = n.run_id AND s.task_id = n.task_id AND (n.alpha, n.beta) IS DISTINCT FROM (o.alpha, o.beta);
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION rft.note_manual_stat() IS 'Trigger: notes what a person changes in task_stat as an outcome of kind manual, with the settings rft.author and rft.reason.';
CREATE TRIGGER stat_manual
    AFTER UPDATE ON rft.task_stat REFERENCING OLD TABLE AS old_rows NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION rft.note_manual_stat();

CREATE FUNCTION rft.fold_task_stat(of_run bigint)
RETURNS TABLE (task_id bigint, alpha double precision, beta double precision, attempts bigint, mean_reward double precision)
LANGUAGE sql STABLE
AS $$
    -- Outcomes of groups that the run has left are not counted. A fork's groups may have ordinals of its parent's, but not their attempts.
    SELECT o.task_id, 1 + sum(o.successes), 1 + sum(o.trials - o.successes), count(*) FILTER (WHERE o.kind = 'explicit'),
           sum(o.successes) / nullif(sum(o.trials), 0)
    FROM rft.task_observation o
    LEFT JOIN rft.rollout_group g ON g.run_id = o.run_id AND g.attempt_id = o.attempt_id AND g.ordinal = o.ordinal
    WHERE o.run_id = of_run AND g.left_by IS NULL GROUP BY o.task_id
$$;
COMMENT ON FUNCTION rft.fold_task_stat(bigint) IS 'What task_stat should hold for a run, from its outcomes.';

CREATE FUNCTION rft.check_task_stat(of_run bigint)
RETURNS TABLE (task_id bigint, alpha double precision, alpha_of_fold double precision, beta double precision, beta_of_fold double precision,
               attempts bigint, attempts_of_fold bigint)
LANGUAGE sql STABLE
AS $$
    SELECT task_id, s.alpha, f.alpha, s.beta, f.beta, s.attempts, f.attempts
    FROM (SELECT t.task_id, t.alpha, t.beta, t.attempts FROM rft.task_stat t WHERE t.run_id = of_run) s
    FULL JOIN rft.fold_task_stat(of_run) f USING (task_id)
    -- Sums in another order differ in their last digits.
    WHERE abs(coalesce(s.alpha, 1) - coalesce(f.alpha, 1)) > 1e-6 OR abs(coalesce(s.beta, 1) - coalesce(f.beta, 1)) > 1e-6
       OR coalesce(s.attempts, 0) <> coalesce(f.attempts, 0)
    ORDER BY task_id
$$;
COMMENT ON FUNCTION rft.check_task_stat(bigint) IS 'Tasks whose row in task_stat is not the fold of their outcomes; no row when all is well.';

CREATE OR REPLACE FUNCTION rft.rebuild_task_stat(of_run bigint) RETURNS bigint
LANGUAGE plpgsql
AS $$
DECLARE
    written bigint;
BEGIN
    PERFORM set_config('rft.folding', 'rebuild', true);
    -- What waits for the end of this very transaction is in the fold below, so it must not be folded again then.
    SET CONSTRAINTS rft.observation_fold_later IMMEDIATE;
    SET CONSTRAINTS rft.observation_fold_later DEFERRED;
    -- Whoever seals a group at this moment has committed before we fold, or adds to what we wrote.
    PERFORM FROM rft.task_stat s WHERE s.run_id = of_run ORDER BY s.task_id FOR UPDATE;
    INSERT INTO rft.task_stat AS s (run_id, task_id, alpha, beta, attempts, mean_reward)
    SELECT of_run, task_id, coalesce(f.alpha, 1), coalesce(f.beta, 1), coalesce(f.attempts, 0), f.mean_reward
    FROM rft.fold_task_stat(of_run) f FULL JOIN (SELECT k.task_id FROM rft.task_stat k WHERE k.run_id = of_run) t USING (task_id)
    ON CONFLICT (run_id, task_id) DO UPDATE
    SET alpha = excluded.alpha, beta = excluded.beta, attempts = excluded.attempts, mean_reward = excluded.mean_reward;
    GET DIAGNOSTICS written = ROW_COUNT;
    PERFORM set_config('rft.folding', '', true);
    RETURN written;
END
$$;

CREATE VIEW rft.v_task_stat AS
SELECT r.name AS run, s.run_id, t.taskset, t.task_key, s.task_id, t.status, s.alpha / (s.alpha + s.beta) AS pass_rate, s.alpha, s.beta,
       s.attempts, s.mean_reward, s.last_selected_at, t.features
FROM rft.task_stat s
JOIN rft.run r USING (run_id)
JOIN rft.task t USING (task_id);
COMMENT ON VIEW rft.v_task_stat IS 'What runs know of the tasks they tried. pass_rate: expected, a task without outcomes counts 0.5; mean_reward: of the outcomes alone.';
