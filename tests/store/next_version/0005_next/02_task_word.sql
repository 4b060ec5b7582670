-- A table that is filled from another one, and a function that is replaced.

CREATE TABLE rft.task_word (
    task_id bigint PRIMARY KEY,
    num_letters integer NOT NULL
);
COMMENT ON TABLE rft.task_word IS 'How long keys of tasks are.';
COMMENT ON COLUMN rft.task_word.task_id IS 'The task.';
COMMENT ON COLUMN rft.task_word.num_letters IS 'Letters of its key.';
INSERT INTO rft.task_word (task_id, num_letters) SELECT task_id, length(task_key) FROM rft.task;

CREATE OR REPLACE FUNCTION rft.num_planned(step integer, per_step double precision, over_sampling double precision, num_steps integer) RETURNS integer
LANGUAGE sql IMMUTABLE STRICT
AS $$
    SELECT CASE WHEN step <= 0 THEN 0 ELSE ceil(round((least(step + over_sampling, greatest(num_steps, step)) * per_step)::numeric, 6))::integer END
$$;
