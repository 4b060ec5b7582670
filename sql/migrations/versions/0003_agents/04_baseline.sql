-- Baselines of roles: running means of rewards from which the advantage `rae` subtracts. See docs/decisions/0050.

-- Append-only, a row for each step that advanced a baseline. What counts follows from the history of an attempt, as for draws: an attempt that continues
-- from an earlier checkpoint does not see the rows of the steps that were left, and restores nothing.
CREATE TABLE rft.role_baseline (
    attempt_id bigint NOT NULL REFERENCES rft.run_attempt,
    trainer_step integer NOT NULL CHECK (trainer_step > 0),
    run_id bigint NOT NULL REFERENCES rft.run,
    taskset text NOT NULL,
    role text NOT NULL,
    baseline double precision NOT NULL CHECK (baseline > '-Infinity' AND baseline < 'Infinity'),
    num_rollouts bigint NOT NULL CHECK (num_rollouts > 0),
    PRIMARY KEY (attempt_id, trainer_step, taskset, role)
);
COMMENT ON TABLE rft.role_baseline IS 'The running mean reward of one role in one taskset after a trainer step, for algorithms that compare rollouts with it (rae). Append-only, stored in the transaction that records the step; rft.v_role_baseline has those of a run''s current history.';
COMMENT ON COLUMN rft.role_baseline.attempt_id IS 'The attempt that made the step.';
COMMENT ON COLUMN rft.role_baseline.trainer_step IS 'The step that advanced it.';
COMMENT ON COLUMN rft.role_baseline.run_id IS 'The run of the attempt, repeated here.';
COMMENT ON COLUMN rft.role_baseline.taskset IS 'The taskset of the rollouts.';
COMMENT ON COLUMN rft.role_baseline.role IS 'The role, as in rft.experience; empty for experiences without one.';
COMMENT ON COLUMN rft.role_baseline.baseline IS 'b after the step: for each rollout that was trained, in turn, b := decay · b + (1 - decay) · reward, from 0.';
COMMENT ON COLUMN rft.role_baseline.num_rollouts IS 'Number of rollouts that have advanced it since the beginning of its history.';

CREATE TRIGGER archived_role_baseline_insert AFTER INSERT ON rft.role_baseline REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_archived_change('run_id');
CREATE TRIGGER role_baseline_facts
    BEFORE UPDATE OR DELETE OR TRUNCATE ON rft.role_baseline FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_fact_change();

CREATE VIEW rft.v_role_baseline AS
SELECT r.name AS run, r.run_id, b.trainer_step, b.taskset, nullif(b.role, '') AS role, b.baseline, b.num_rollouts
FROM rft.run r
JOIN rft.v_attempt_history h ON h.history_id = r.current_attempt_id
JOIN rft.role_baseline b ON b.attempt_id = h.attempt_id AND (h.last_step IS NULL OR b.trainer_step <= h.last_step);
COMMENT ON VIEW rft.v_role_baseline IS 'The baselines of roles of a run''s current history, after each step that advanced them.';
