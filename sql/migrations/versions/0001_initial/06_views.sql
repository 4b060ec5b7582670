-- The analyst's API.

CREATE VIEW rft.v_consumption AS
SELECT r.run_id, d.draw_id, d.attempt_id, d.trainer_step, d.slot, d.item_kind, d.item_id, d.experience_id, d.reward_used, d.staleness,
       (SELECT min(c.checkpoint_id) FROM rft.checkpoint c
        WHERE c.attempt_id = d.attempt_id AND c.trainer_step >= d.trainer_step) AS checkpoint_id
FROM rft.run r
JOIN rft.v_history h ON h.history_id = r.current_attempt_id
JOIN rft.draw d ON d.attempt_id = h.attempt_id AND (h.last_step IS NULL OR d.trainer_step <= h.last_step)
WHERE EXISTS (SELECT FROM rft.checkpoint c WHERE c.attempt_id = d.attempt_id AND c.trainer_step >= d.trainer_step);
COMMENT ON VIEW rft.v_consumption IS 'Draws that lie at or before a committed checkpoint of their run''s present history: what the weights on disk were trained on.';

CREATE VIEW rft.v_experience AS
SELECT e.experience_id, r.name AS run, e.run_id, t.taskset, t.task_key, e.group_id, g.explore_step, ro.rollout_index, e.turn_index,
       ro.outcome, e.prompt, e.response, t.payload ->> 'answer' AS answer,
       e.reward_sampled, e.reward, v.reward AS reward_shaped,
       CASE WHEN e.reward_final THEN e.reward ELSE coalesce(v.reward, e.reward) END AS reward_trained,
       e.reward_parts, e.metrics, e.finish_reason, e.num_prompt_tokens, e.num_response_tokens,
       p.trainer_step AS policy_step, e.policy_version_min, e.policy_version_max,
       CASE WHEN d.times > 0 THEN 'drawn'
            WHEN g.status = 'sealed' THEN 'awaits verdict'
            WHEN NOT v.kept THEN 'dropped'
            WHEN NOT g.trainable THEN 'closed'
            ELSE 'ready' END AS state,
       v.stage AS dropped_by, coalesce(v.reason, g.closed_reason) AS dropped_because,
       d.times AS times_sampled, d.steps AS trainer_steps, l.num_labels,
       e.source, e.messages, e.parent_id, e.segment_id, e.segment_row, e.created_at
FROM rft.experience e
JOIN rft.run r USING (run_id)
JOIN rft.rollout_group g USING (group_id)
JOIN rft.rollout ro USING (rollout_id)
JOIN rft.task t USING (task_id)
LEFT JOIN rft.policy_version p ON p.policy_version_id = e.policy_version_min
LEFT JOIN LATERAL (
    SELECT v.* FROM rft.verdict v
    WHERE v.experience_id = e.experience_id AND v.pipeline_version = r.pipeline_version
    ORDER BY v.verdict_id DESC LIMIT 1) v ON true
LEFT JOIN LATERAL (
    SELECT count(*) AS times, array_agg(d.trainer_step ORDER BY d.trainer_step) AS steps
    FROM rft.draw d
    JOIN rft.v_history h ON h.history_id = r.current_attempt_id AND h.attempt_id = d.attempt_id
        AND (h.last_step IS NULL OR d.trainer_step <= h.last_step)
    WHERE d.experience_id = e.experience_id) d ON true
LEFT JOIN LATERAL (
    SELECT count(*) AS num_labels FROM rft.label l WHERE l.experience_id = e.experience_id) l ON true;
COMMENT ON VIEW rft.v_experience IS 'Everything about one experience in one place.';

CREATE VIEW rft.v_group AS
SELECT g.group_id, r.name AS run, g.run_id, t.taskset, t.task_key, g.explore_step, g.ordinal, g.status, g.is_refill, g.trainable,
       g.closed_reason, g.group_size, o.num_ok, o.num_failed, o.mean_reward, o.std_reward, g.planned_at, g.sealed_at, g.ready_at
FROM rft.rollout_group g
JOIN rft.run r USING (run_id)
JOIN rft.task t USING (task_id)
LEFT JOIN LATERAL (
    SELECT count(*) FILTER (WHERE outcome = 'ok') AS num_ok, count(*) FILTER (WHERE outcome <> 'ok') AS num_failed,
           avg(reward) AS mean_reward, stddev_samp(reward) AS std_reward
    FROM rft.rollout WHERE group_id = g.group_id) o ON true;
COMMENT ON VIEW rft.v_group IS 'Groups with the outcome of their rollouts.';

CREATE VIEW rft.v_pass_rate AS
SELECT r.name AS run, g.run_id, t.taskset, g.explore_step, count(DISTINCT g.group_id) AS num_groups, count(*) AS num_rollouts,
       avg(o.reward) AS mean_reward, avg((o.reward >= 1)::integer) AS pass_rate
FROM rft.rollout_group g
JOIN rft.run r USING (run_id)
JOIN rft.task t USING (task_id)
JOIN rft.rollout o USING (group_id)
GROUP BY r.name, g.run_id, t.taskset, g.explore_step;
COMMENT ON VIEW rft.v_pass_rate IS 'Rewards as sampled, by run, taskset and explorer step; dropped groups count.';

CREATE VIEW rft.v_lineage AS
SELECT d.experience_id, r.name AS run, d.attempt_id, d.trainer_step, d.reward_used, e.reward AS reward_now,
       d.reward_used IS DISTINCT FROM coalesce(CASE WHEN e.reward_final THEN e.reward END, (
           SELECT v.reward FROM rft.verdict v
           WHERE v.experience_id = e.experience_id AND v.pipeline_version = r.pipeline_version
           ORDER BY v.verdict_id DESC LIMIT 1), e.reward) AS corrected_since,
       c.checkpoint_id, c.trainer_step AS checkpoint_step, c.uri AS checkpoint_uri
FROM rft.draw d
JOIN rft.run_attempt a USING (attempt_id)
JOIN rft.run r USING (run_id)
JOIN rft.experience e USING (experience_id)
LEFT JOIN LATERAL (
    SELECT * FROM rft.checkpoint c WHERE c.attempt_id = d.attempt_id AND c.trainer_step >= d.trainer_step
    ORDER BY c.trainer_step LIMIT 1) c ON true;
COMMENT ON VIEW rft.v_lineage IS 'Experience to steps to the first checkpoint that contains them, and back; corrected_since: the reward changed after it was drawn.';

CREATE VIEW rft.v_waiting AS
SELECT w.worker_id, r.name AS run, w.role, w.host, w.pid, w.state, w.waiting_for, w.progress, w.error,
       CASE WHEN w.stopped_at IS NOT NULL THEN 'stopped'
            WHEN w.heartbeat_at < rft.clock() - interval '15 s' THEN 'lost'
            ELSE 'alive' END AS liveness,
       extract(epoch FROM rft.clock() - w.heartbeat_at)::double precision AS heartbeat_age_s, w.started_at, w.stopped_at
FROM rft.worker w JOIN rft.run r USING (run_id);
COMMENT ON VIEW rft.v_waiting IS 'What each process does or waits for.';

CREATE VIEW rft.v_train_step AS
SELECT r.name AS run, s.run_id, s.trainer_step, s.attempt_id, s.outcome, s.reason, s.num_groups, s.num_experiences, s.num_tokens,
       s.wait_seconds, s.train_seconds, s.publish_seconds, s.metrics, s.finished_at
FROM rft.run r
JOIN rft.v_history h ON h.history_id = r.current_attempt_id
JOIN rft.train_step s ON s.attempt_id = h.attempt_id AND (h.last_step IS NULL OR s.trainer_step <= h.last_step);
COMMENT ON VIEW rft.v_train_step IS 'The steps of a run''s present history: one continuous curve, whatever crashed in between.';

CREATE VIEW rft.v_dropped AS
SELECT r.name AS run, v.run_id, v.stage, v.reason, count(*) AS num_experiences, count(DISTINCT v.group_id) AS num_groups
FROM (SELECT DISTINCT ON (v.experience_id) e.run_id, v.*
      FROM rft.verdict v JOIN rft.experience e USING (experience_id) JOIN rft.run USING (run_id)
      WHERE v.pipeline_version = run.pipeline_version
      ORDER BY v.experience_id, v.verdict_id DESC) v
JOIN rft.run r USING (run_id)
WHERE NOT v.kept
GROUP BY r.name, v.run_id, v.stage, v.reason;
COMMENT ON VIEW rft.v_dropped IS 'Dropped experiences by stage and reason, newest verdict of the run''s pipeline.';
