-- The experience table with every text in its row, as it was before prompts were stored once per group; see text_bytes.py.

-- name: fill_table
CREATE VIEW public.rows_of_texts AS
SELECT e.experience_id, e.run_id, e.group_id, e.rollout_id, e.turn_index, e.source, e.parent_id, v.prompt, e.response, v.messages,
       e.reward_sampled, e.reward, e.reward_final, e.reward_parts, e.metrics, e.policy_version_min, e.policy_version_max,
       e.num_prompt_tokens, e.num_response_tokens, e.finish_reason, e.segment_id, e.segment_row, e.created_at
FROM rft.experience e JOIN rft.v_experience v USING (experience_id);
CREATE TABLE public.texts_in_rows WITH (fillfactor = 75, toast_tuple_target = 1024) AS SELECT * FROM public.rows_of_texts WITH NO DATA;
ALTER TABLE public.texts_in_rows
    ALTER COLUMN prompt SET STORAGE EXTERNAL, ALTER COLUMN response SET STORAGE EXTERNAL, ALTER COLUMN messages SET STORAGE EXTERNAL,
    ADD PRIMARY KEY (experience_id);
CREATE INDEX ON public.texts_in_rows (group_id);
CREATE INDEX ON public.texts_in_rows (parent_id) WHERE parent_id IS NOT NULL;
INSERT INTO public.texts_in_rows SELECT * FROM public.rows_of_texts ORDER BY experience_id;

-- name: sizes
-- All tables of the buffer with their indexes and long texts; of them those with the texts of experiences; and the table above.
SELECT sum(pg_total_relation_size(oid))::bigint AS all_bytes,
       (sum(pg_total_relation_size(oid)) FILTER (WHERE relname IN ('experience', 'group_prompt')))::bigint AS text_bytes,
       coalesce(pg_total_relation_size(to_regclass('public.texts_in_rows')), 0) AS texts_in_rows_bytes
FROM pg_class WHERE relnamespace = 'rft'::regnamespace AND relkind = 'r';
