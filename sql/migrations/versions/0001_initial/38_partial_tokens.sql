-- What explorers have sampled for groups that are not complete, so that others continue it.

CREATE TABLE rft.partial_tokens (
    group_id bigint NOT NULL,
    rollout_index integer NOT NULL,
    generation_index integer NOT NULL,
    claim_token bigint NOT NULL,
    first_token integer NOT NULL,
    input_digest bytea NOT NULL,
    token_ids integer[] NOT NULL,
    logprobs real[] NOT NULL,
    version_starts integer[] NOT NULL,
    policy_version_ids bigint[] NOT NULL,
    finish_reason text,
    PRIMARY KEY (group_id, rollout_index, generation_index, claim_token, first_token)
);
COMMENT ON TABLE rft.partial_tokens IS 'A part of an answer for a group that is not complete. The explorer that claims the group next continues it. Deleted when the group is sealed, and when the run finishes.';
COMMENT ON COLUMN rft.partial_tokens.group_id IS 'The group that the answer belongs to.';
COMMENT ON COLUMN rft.partial_tokens.rollout_index IS 'The rollout''s place in the group, from 0; the group''s size: its greedy rollout.';
COMMENT ON COLUMN rft.partial_tokens.generation_index IS 'The answer''s place in the rollout, from 0.';
COMMENT ON COLUMN rft.partial_tokens.claim_token IS 'The claim under which the part was sampled. A later one replaces what it repeats.';
COMMENT ON COLUMN rft.partial_tokens.first_token IS 'Place of the part''s first token in the answer, from 0.';
COMMENT ON COLUMN rft.partial_tokens.input_digest IS 'SHA-256 of the tokens of the prompt and the sampling parameters. Only an equal request continues the answer.';
COMMENT ON COLUMN rft.partial_tokens.token_ids IS 'The sampled tokens of this part.';
COMMENT ON COLUMN rft.partial_tokens.logprobs IS 'Their log-probabilities under the policy that sampled them, nats.';
COMMENT ON COLUMN rft.partial_tokens.version_starts IS 'Places in the answer from which on each policy version sampled.';
COMMENT ON COLUMN rft.partial_tokens.policy_version_ids IS 'The policy versions that sampled, one for each entry of version_starts.';
COMMENT ON COLUMN rft.partial_tokens.finish_reason IS 'stop or length, with the last part of a finished answer; NULL before.';
