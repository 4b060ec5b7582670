-- Roles of one policy: which of a workflow's roles sampled an experience. See docs/decisions/0050.

ALTER TABLE rft.experience ADD COLUMN role text CHECK (length(role) BETWEEN 1 AND 100);
COMMENT ON COLUMN rft.experience.role IS 'The role that the policy played in it, as the workflow names it; NULL where the workflow has only one. Each role has chats of its own, so an experience has one role.';

DROP TRIGGER experience_facts ON rft.experience;
CREATE TRIGGER experience_facts
    BEFORE UPDATE OF experience_id, run_id, group_id, rollout_id, turn_index, source, parent_id, prompt_digest, response, response_messages,
        reward_sampled, reward_parts, metrics, policy_version_min, policy_version_max, num_prompt_tokens,
        num_response_tokens, num_trained_tokens, num_turns, fork, role, finish_reason, segment_id, segment_row, created_at
    ON rft.experience FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_fact_change();
