-- Why rollouts stopped: a limit that was reached keeps the rollout.

CREATE TYPE rft.stop_reason AS ENUM ('max_turns', 'max_rollout_tokens', 'context_length', 'rollout_timeout');
COMMENT ON TYPE rft.stop_reason IS 'A limit that ends a rollout and keeps it. max_turns: its turns; max_rollout_tokens: the tokens that it sampled; context_length: the engine has no room for the next prompt; rollout_timeout: its time.';

ALTER TABLE rft.rollout ADD COLUMN stop_reason rft.stop_reason;
COMMENT ON COLUMN rft.rollout.stop_reason IS 'The limit that ended it; NULL if its workflow ended it, or it failed.';
