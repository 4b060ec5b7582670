-- Budgets of stages that ask a model: what a run has spent, whatever was restarted meanwhile and however many workers spend.

CREATE TABLE rft.endpoint_usage (
    run_id bigint NOT NULL,
    name text NOT NULL,
    num_calls bigint NOT NULL DEFAULT 0,
    num_tokens bigint NOT NULL DEFAULT 0,
    cost double precision NOT NULL DEFAULT 0,
    updated_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (run_id, name)
);
COMMENT ON TABLE rft.endpoint_usage IS 'What the stages of a run have spent on model calls, against their budgets. Calls in flight count with an estimate.';
COMMENT ON COLUMN rft.endpoint_usage.run_id IS 'The run.';
COMMENT ON COLUMN rft.endpoint_usage.name IS 'The budget''s name: the stage''s own unless several share one.';
COMMENT ON COLUMN rft.endpoint_usage.num_calls IS 'Requests sent, repeated ones too.';
COMMENT ON COLUMN rft.endpoint_usage.num_tokens IS 'Tokens of prompts and answers. A call whose answer never came counts with its estimate.';
COMMENT ON COLUMN rft.endpoint_usage.cost IS 'In the currency of the budget''s prices; 0 where it has none.';
COMMENT ON COLUMN rft.endpoint_usage.updated_at IS 'When it was spent last.';
