-- A final label is what is trained with, whatever a version made of the reward.

CREATE OR REPLACE FUNCTION rft.compare_verdicts(of_run bigint, version_a text, version_b text)
RETURNS TABLE (
    experience_id bigint, group_id bigint, reward double precision, a_kept boolean, a_stage text, a_reason text, a_reward double precision,
    b_kept boolean, b_stage text, b_reason text, b_reward double precision)
LANGUAGE sql STABLE
AS $$
    SELECT e.experience_id, e.group_id, e.reward,
           a.kept, a.stage, a.reason, CASE WHEN e.reward_final THEN e.reward ELSE coalesce(a.reward, e.reward) END,
           b.kept, b.stage, b.reason, CASE WHEN e.reward_final THEN e.reward ELSE coalesce(b.reward, e.reward) END
    FROM rft.experience e
    CROSS JOIN LATERAL (
        SELECT * FROM rft.verdict v WHERE v.experience_id = e.experience_id AND v.pipeline_version = version_a
        ORDER BY v.verdict_id DESC LIMIT 1) a
    CROSS JOIN LATERAL (
        SELECT * FROM rft.verdict v WHERE v.experience_id = e.experience_id AND v.pipeline_version = version_b
        ORDER BY v.verdict_id DESC LIMIT 1) b
    WHERE e.run_id = of_run
$$;
