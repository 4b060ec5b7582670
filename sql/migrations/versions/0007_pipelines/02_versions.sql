-- Which stages a pipeline version has, so that verdicts of long ago can be understood and compared.

CREATE TABLE rft.pipeline (
    pipeline_version text PRIMARY KEY,
    digest text NOT NULL,
    stages jsonb NOT NULL,
    first_used_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON TABLE rft.pipeline IS 'One version of an operator chain that decided on experiences.';
COMMENT ON COLUMN rft.pipeline.pipeline_version IS 'What verdicts name: the digest, or the name that a replay was given.';
COMMENT ON COLUMN rft.pipeline.digest IS 'Of everything that determines what the chain decides.';
COMMENT ON COLUMN rft.pipeline.stages IS 'Its stages with their resolved arguments, in order.';
COMMENT ON COLUMN rft.pipeline.first_used_at IS 'When it first decided.';

-- Answers come from people who may write nothing else.
ALTER FUNCTION rft.reopen_answered() SECURITY DEFINER SET search_path = pg_catalog, pg_temp;
ALTER FUNCTION rft.answer_by_label() SECURITY DEFINER SET search_path = pg_catalog, pg_temp;
ALTER FUNCTION rft.lock_groups_and_reviews(bigint[]) SECURITY DEFINER SET search_path = pg_catalog, pg_temp;
REVOKE ALL ON FUNCTION rft.lock_groups_and_reviews(bigint[]) FROM PUBLIC;

SELECT rft.grant_roles();
