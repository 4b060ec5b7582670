-- Prompts: each text once per group, however many rollouts answer it.

-- The experiences of a group refer to a prompt by its digest. The primary key makes a prompt one row, and rejects a second text with
-- the same digest. Uncompressed, like the texts of rft.experience. See docs/decisions/0028.
CREATE TABLE rft.group_prompt (
    group_id bigint NOT NULL,
    prompt_digest bytea NOT NULL,
    prompt text NOT NULL,
    messages jsonb,
    PRIMARY KEY (group_id, prompt_digest)
);
ALTER TABLE rft.group_prompt
    ALTER COLUMN prompt SET STORAGE EXTERNAL, ALTER COLUMN messages SET STORAGE EXTERNAL;
COMMENT ON TABLE rft.group_prompt IS 'One prompt of a group, shared by the rollouts that answer it. Immutable; a purge deletes it with the last experience that refers to it.';
COMMENT ON COLUMN rft.group_prompt.group_id IS 'The group whose rollouts share the prompt.';
COMMENT ON COLUMN rft.group_prompt.prompt_digest IS 'BLAKE2b of prompt and messages, 16 bytes. Empty: the row that purged experiences refer to.';
COMMENT ON COLUMN rft.group_prompt.prompt IS 'What the model saw, as text.';
COMMENT ON COLUMN rft.group_prompt.messages IS 'The first messages of the chat, common to all experiences with this prompt; NULL if they have no chat.';

CREATE TRIGGER group_prompt_facts
    BEFORE UPDATE OR DELETE OR TRUNCATE ON rft.group_prompt FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_fact_change();

CREATE FUNCTION rft.same_prompt(group_a bigint, digest_a bytea, group_b bigint, digest_b bytea) RETURNS boolean
LANGUAGE sql STABLE PARALLEL SAFE
AS $$
    SELECT (group_a, digest_a) = (group_b, digest_b)
        OR (SELECT prompt FROM rft.group_prompt WHERE group_id = group_a AND prompt_digest = digest_a)
         = (SELECT prompt FROM rft.group_prompt WHERE group_id = group_b AND prompt_digest = digest_b)
$$;
COMMENT ON FUNCTION rft.same_prompt(bigint, bytea, bigint, bytea) IS 'Returns whether two experiences, given by group and prompt_digest, answer the same prompt, so that they may be a preference pair. Texts are read only for different groups or digests.';

-- The planner inlines this function, so it is an expression of the query that reads the chat, not a call per row. PARALLEL SAFE: without it no query on
-- v_experience would use a second core, whether it reads the chat or not.
CREATE FUNCTION rft.chat(prompt_messages jsonb, response_messages jsonb, response text) RETURNS jsonb
LANGUAGE sql STABLE PARALLEL SAFE
AS $$
    SELECT CASE WHEN prompt_messages IS NULL THEN response_messages
                ELSE prompt_messages || coalesce(response_messages, jsonb_build_array(jsonb_build_object('role', 'assistant', 'content', response)))
           END
$$;
COMMENT ON FUNCTION rft.chat(jsonb, jsonb, text) IS 'The messages of an experience: those of its prompt followed by its own, or by its response as one message of the assistant if it has none.';
