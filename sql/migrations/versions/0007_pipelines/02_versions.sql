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

CREATE FUNCTION rft.compare_verdicts(of_run bigint, version_a text, version_b text)
RETURNS TABLE (
    experience_id bigint, group_id bigint, reward double precision, a_kept boolean, a_stage text, a_reason text, a_reward double precision,
    b_kept boolean, b_stage text, b_reason text, b_reward double precision)
LANGUAGE sql STABLE
AS $$
    SELECT e.experience_id, e.group_id, e.reward, a.kept, a.stage, a.reason, coalesce(a.reward, e.reward),
           b.kept, b.stage, b.reason, coalesce(b.reward, e.reward)
    FROM rft.experience e
    CROSS JOIN LATERAL (
        SELECT * FROM rft.verdict v WHERE v.experience_id = e.experience_id AND v.pipeline_version = version_a
        ORDER BY v.verdict_id DESC LIMIT 1) a
    CROSS JOIN LATERAL (
        SELECT * FROM rft.verdict v WHERE v.experience_id = e.experience_id AND v.pipeline_version = version_b
        ORDER BY v.verdict_id DESC LIMIT 1) b
    WHERE e.run_id = of_run
$$;
COMMENT ON FUNCTION rft.compare_verdicts IS 'Experiences of a run on which two versions have decided, with the last verdict of each; rewards as they would be trained with.';

-- Answers come from people who may write nothing else.
ALTER FUNCTION rft.reopen_answered() SECURITY DEFINER SET search_path = pg_catalog, pg_temp;
ALTER FUNCTION rft.answer_by_label() SECURITY DEFINER SET search_path = pg_catalog, pg_temp;
ALTER FUNCTION rft.lock_groups_and_reviews(bigint[]) SECURITY DEFINER SET search_path = pg_catalog, pg_temp;
REVOKE ALL ON FUNCTION rft.lock_groups_and_reviews(bigint[]) FROM PUBLIC;

SELECT rft.grant_roles();
