-- Prompts: a text once per group, however many rollouts answer it.

-- The experiences of a group refer to it by its digest. The primary key is what makes a prompt one row, and refuses a second text of
-- the same digest. Uncompressed, as the texts of rft.experience. See docs/decisions/0028.
CREATE TABLE rft.group_prompt (
    group_id bigint NOT NULL,
    prompt_digest bytea NOT NULL,
    prompt text NOT NULL,
    messages jsonb,
    PRIMARY KEY (group_id, prompt_digest)
);
ALTER TABLE rft.group_prompt
    ALTER COLUMN prompt SET STORAGE EXTERNAL, ALTER COLUMN messages SET STORAGE EXTERNAL;
COMMENT ON TABLE rft.group_prompt IS 'One prompt of a group: the rollouts that answer it share the row. Immutable; a purge deletes it with the last experience that has it.';
COMMENT ON COLUMN rft.group_prompt.group_id IS 'The group.';
COMMENT ON COLUMN rft.group_prompt.prompt_digest IS 'BLAKE2b of prompt and messages, 16 bytes. Empty: the row that purged experiences refer to.';
COMMENT ON COLUMN rft.group_prompt.prompt IS 'What the model saw, as text.';
COMMENT ON COLUMN rft.group_prompt.messages IS 'The first messages of the chat, which the experiences of this prompt have in common; NULL where they have no chat.';

CREATE TRIGGER group_prompt_facts
    BEFORE UPDATE OR DELETE OR TRUNCATE ON rft.group_prompt FOR EACH STATEMENT EXECUTE FUNCTION rft.refuse_fact_change();

-- The planner inlines this function: it is an expression of the query that reads the chat, not a call per row.
CREATE FUNCTION rft.chat(prompt_messages jsonb, response_messages jsonb, response text) RETURNS jsonb
LANGUAGE sql STABLE
AS $$
    SELECT CASE WHEN prompt_messages IS NULL THEN response_messages
                ELSE prompt_messages || coalesce(response_messages, jsonb_build_array(jsonb_build_object('role', 'assistant', 'content', response)))
           END
$$;
COMMENT ON FUNCTION rft.chat(jsonb, jsonb, text) IS 'The messages of an experience: those of its prompt and those of its response, which is one message of the assistant where it has none of its own.';
