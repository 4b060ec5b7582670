-- Vectors of tasks' texts. They are arrays at first, so that the schema is the same on every server. When the first vectors are stored,
-- rft.use_pgvector converts the column to the type of the extension pgvector, if the server has it.

CREATE TABLE rft.task_embedding (
    task_id bigint NOT NULL,
    model text NOT NULL,
    text_digest bigint NOT NULL,
    embedding real[] NOT NULL,
    embedded_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (task_id, model)
);
COMMENT ON TABLE rft.task_embedding IS 'The vector of a task''s prompt by one model.';
COMMENT ON COLUMN rft.task_embedding.task_id IS 'The task whose prompt was encoded.';
COMMENT ON COLUMN rft.task_embedding.model IS 'The encoder: its name, and a digest of its files if it is a folder.';
COMMENT ON COLUMN rft.task_embedding.text_digest IS 'xxh3-64 of the text, as a signed number: a changed text is encoded again.';
COMMENT ON COLUMN rft.task_embedding.embedding IS 'Mean-pooled hidden states, not normalised. real[], or vector once rft.use_pgvector() has found the extension.';
COMMENT ON COLUMN rft.task_embedding.embedded_at IS 'When it was encoded; the newest is the default of rft.similar_tasks.';

CREATE FUNCTION rft.use_pgvector() RETURNS text
LANGUAGE plpgsql
AS $$
DECLARE
    place name;
BEGIN
    IF (SELECT format_type(atttypid, atttypmod) FROM pg_attribute
        WHERE attrelid = 'rft.task_embedding'::regclass AND attname = 'embedding') <> 'real[]' THEN
        RETURN 'vector';
    END IF;
    IF NOT EXISTS (SELECT FROM pg_available_extensions WHERE name = 'vector') THEN
        RETURN 'real[]';
    END IF;
    -- A role without the right keeps arrays.
    BEGIN
        CREATE EXTENSION IF NOT EXISTS vector;
        SELECT n.nspname INTO place FROM pg_extension e JOIN pg_namespace n ON n.oid = e.extnamespace WHERE e.extname = 'vector';
        EXECUTE format('ALTER TABLE rft.task_embedding ALTER COLUMN embedding TYPE %I.vector USING embedding::%I.vector', place, place);
    EXCEPTION
        WHEN insufficient_privilege OR feature_not_supported OR undefined_file THEN RETURN 'real[]';
    END;
    RETURN 'vector';
END
$$;
COMMENT ON FUNCTION rft.use_pgvector() IS 'Converts task embeddings to vectors of pgvector, if the server has the extension and the caller has the right; returns the column''s type.';

CREATE FUNCTION rft.similar_tasks(of_task bigint, num_tasks integer DEFAULT 10, of_model text DEFAULT NULL)
RETURNS TABLE (task_id bigint, similarity double precision)
LANGUAGE plpgsql STABLE
AS $$
DECLARE
    place name := (SELECT n.nspname FROM pg_extension e JOIN pg_namespace n ON n.oid = e.extnamespace
                   JOIN pg_attribute a ON a.attrelid = 'rft.task_embedding'::regclass AND a.attname = 'embedding'
                   WHERE e.extname = 'vector' AND format_type(a.atttypid, a.atttypmod) <> 'real[]');
    distance text;
BEGIN
    of_model := coalesce(of_model, (SELECT e.model FROM rft.task_embedding e WHERE e.task_id = of_task ORDER BY e.embedded_at DESC LIMIT 1));
    IF place IS NULL THEN
        RETURN QUERY
        SELECT e.task_id, s.dot / nullif(sqrt(s.one) * sqrt(s.other), 0) AS similarity
        FROM rft.task_embedding q
        JOIN rft.task_embedding e ON e.model = q.model AND e.task_id <> q.task_id
        CROSS JOIN LATERAL (
            SELECT sum(a.x::double precision * a.y) AS dot, sum(a.x::double precision * a.x) AS one, sum(a.y::double precision * a.y) AS other
            FROM unnest(q.embedding, e.embedding) AS a (x, y)) s
        WHERE q.task_id = of_task AND q.model = of_model
        ORDER BY 2 DESC NULLS LAST, 1 LIMIT num_tasks;
        RETURN;
    END IF;
    distance := format('e.embedding OPERATOR(%I.<=>) q.embedding', place);
    RETURN QUERY EXECUTE format($sql$
        SELECT e.task_id, 1 - (%s) FROM rft.task_embedding q
        JOIN rft.task_embedding e ON e.model = q.model AND e.task_id <> q.task_id
        WHERE q.task_id = $1 AND q.model = $2 ORDER BY %s, e.task_id LIMIT $3$sql$, distance, distance)
    USING of_task, of_model, num_tasks;
END
$$;
COMMENT ON FUNCTION rft.similar_tasks(bigint, integer, text) IS 'Returns the tasks nearest to a task by the cosine of their vectors, over all tasksets; of_model is the newest model by default.';
