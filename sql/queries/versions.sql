-- name: groups_to_replay (read)
-- Whole groups of a run, after a given one, with experiences that a version has not decided on, or not since their last label or answered
-- question.
SELECT g.group_id FROM rft.rollout_group g
WHERE g.run_id = %(run_id)s AND g.group_id > %(after)s AND g.status IN ('sealed', 'ready') AND g.left_by IS NULL
  AND EXISTS (SELECT FROM rft.experience e WHERE e.group_id = g.group_id)
  AND NOT EXISTS (
      SELECT FROM rft.verdict v
      WHERE v.group_id = g.group_id AND v.pipeline_version = %(version)s
        AND v.label_cut >= greatest((SELECT max(l.label_id) FROM rft.label l JOIN rft.experience e USING (experience_id)
                                     WHERE e.group_id = g.group_id),
                                    (SELECT max(q.answer_id) FROM rft.review q WHERE q.group_id = g.group_id),
                                    rft.newest_read_annotation(g.group_id, %(version)s, false), 0))
ORDER BY g.group_id LIMIT %(count)s;

-- name: groups_without_verdict
-- Those of these groups that a version has not decided on with all labels and answers up to the given one. The groups are locked.
-- (Looked up by key, one after the other: a scalar subquery is never a join.)
SELECT g.group_id FROM unnest(%(group_ids)s::bigint[], %(label_cuts)s::bigint[]) AS g (group_id, label_cut)
WHERE ((SELECT max(v.label_cut) FROM rft.verdict v WHERE v.group_id = g.group_id AND v.pipeline_version = %(version)s) >= g.label_cut)
      IS NOT TRUE;

-- name: sample_groups (read)
-- Whole groups of a run with experiences, in an order that depends only on the seed.
SELECT group_id, (SELECT count(*) FROM rft.experience e WHERE e.group_id = g.group_id) AS num_experiences
FROM rft.rollout_group g WHERE g.run_id = %(run_id)s AND g.status IN ('sealed', 'ready') AND g.left_by IS NULL
  AND EXISTS (SELECT FROM rft.experience e WHERE e.group_id = g.group_id)
ORDER BY hashint8extended(g.group_id, %(seed)s), g.group_id LIMIT %(count)s;

-- name: pipeline_versions (read)
-- Versions that decided on experiences of a run, with their stages and arguments. used: the run trains, or has trained, on this version.
SELECT v.pipeline_version,
       v.pipeline_version = r.pipeline_version
           OR EXISTS (SELECT FROM rft.rollout_group g WHERE g.run_id = r.run_id AND g.decided_by = v.pipeline_version) AS used, v.num_kept, v.num_dropped, p.first_used_at, p.stages
FROM rft.run r
CROSS JOIN LATERAL (
    SELECT n.pipeline_version, count(*) FILTER (WHERE n.kept) AS num_kept, count(*) FILTER (WHERE NOT n.kept) AS num_dropped
    FROM rft.verdict n JOIN rft.rollout_group g USING (group_id)
    WHERE g.run_id = r.run_id AND n.is_newest
    GROUP BY n.pipeline_version) v
LEFT JOIN rft.pipeline p ON p.pipeline_version = v.pipeline_version
WHERE r.run_id = %(run_id)s
ORDER BY p.first_used_at, v.pipeline_version;

-- name: compare_versions (read)
-- Number of a run's experiences per pair of results of two versions (NULL: none), and the first that differ, oldest first.
SELECT before, after, count(*) AS num_experiences,
       count(*) FILTER (WHERE a_kept AND b_kept AND a_reward IS DISTINCT FROM b_reward) AS num_rewards_changed,
       avg(b_reward - a_reward) FILTER (WHERE a_kept AND b_kept) AS mean_reward_change,
       coalesce((array_agg(experience_id ORDER BY experience_id) FILTER (WHERE before <> after OR (a_kept AND b_kept AND a_reward IS DISTINCT FROM b_reward)))
           [1:%(count)s], '{}') AS different
FROM (
    SELECT e.experience_id, a.kept AS a_kept, b.kept AS b_kept,
           CASE WHEN a.kept THEN 'kept' ELSE a.stage END AS before, CASE WHEN b.kept THEN 'kept' ELSE b.stage END AS after,
           CASE WHEN e.reward_final THEN e.reward ELSE coalesce(a.reward, e.reward) END AS a_reward,
           CASE WHEN e.reward_final THEN e.reward ELSE coalesce(b.reward, e.reward) END AS b_reward
    FROM rft.experience e
    LEFT JOIN rft.verdict a ON a.experience_id = e.experience_id AND a.newest_of = %(before)s
    LEFT JOIN rft.verdict b ON b.experience_id = e.experience_id AND b.newest_of = %(after)s
    WHERE e.run_id = %(run_id)s AND (a.verdict_id IS NOT NULL OR b.verdict_id IS NOT NULL)) c
GROUP BY before, after ORDER BY 3 DESC, 1, 2;

-- name: rows_that_differ (read)
-- How two versions treat experiences of a run, oldest first.
SELECT experience_id, group_id, reward, CASE WHEN a_kept THEN 'kept' ELSE a_stage || ': ' || a_reason END AS before,
       CASE WHEN b_kept THEN 'kept' ELSE b_stage || ': ' || b_reason END AS after,
       CASE WHEN a_kept THEN a_reward END AS reward_before, CASE WHEN b_kept THEN b_reward END AS reward_after
FROM rft.compare_verdicts(%(run_id)s, %(before)s, %(after)s)
WHERE experience_id = ANY (%(experience_ids)s) ORDER BY experience_id;

-- name: pipeline_of_experience (read)
-- All pipeline results for one experience, in order of time.
SELECT * FROM (
    SELECT v.decided_at AS at, v.pipeline_version AS version, coalesce(v.stage, 'all stages') AS stage,
           CASE WHEN v.kept THEN 'kept' ELSE 'dropped' END AS what,
           CASE WHEN NOT v.kept THEN v.reason
                ELSE concat_ws(', ', 'reward ' || v.reward, 'priority ' || nullif(v.priority, 0)) END AS detail
    FROM rft.verdict v WHERE v.experience_id = %(experience_id)s
    UNION ALL
    SELECT s.scored_at, NULL, s.stage, 'scored', coalesce(s.error, s.scores::text) FROM rft.score s WHERE s.experience_id = %(experience_id)s
    UNION ALL
    SELECT w.asked_at, NULL, w.name, 'asked', w.question FROM rft.review w WHERE w.experience_id = %(experience_id)s
    UNION ALL
    SELECT least(w.answered_at, w.deadline), NULL, w.name, w.state,
           CASE WHEN w.answer IS NOT NULL AND w.answered_at < w.deadline THEN w.author ELSE 'no answer in time' END
    FROM rft.v_review w WHERE w.experience_id = %(experience_id)s AND w.state <> 'waiting') x
ORDER BY at, what;
