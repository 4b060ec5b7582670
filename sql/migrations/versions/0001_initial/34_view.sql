-- The views that users query.

-- The planner inlines it. One vocabulary for experiences and groups.
CREATE FUNCTION rft.state(status rft.group_status, times_sampled bigint, kept boolean, trainable boolean) RETURNS text
LANGUAGE sql STABLE PARALLEL SAFE
AS $$
    SELECT CASE WHEN times_sampled > 0 THEN 'drawn'
                WHEN status = 'sealed' THEN 'awaits verdict'
                WHEN status <> 'ready' THEN status::text
                WHEN NOT kept THEN 'dropped'
                WHEN NOT trainable THEN 'closed'
                ELSE 'ready' END
$$;
COMMENT ON FUNCTION rft.state IS 'Returns the state of an experience or a group: drawn, awaits verdict, dropped (by the chain), closed (not trained on for another reason) or ready; of a group that has no experiences yet, its status.';

CREATE VIEW rft.v_attempt_history AS SELECT history_id, attempt_id, last_step FROM rft.attempt_history;
COMMENT ON VIEW rft.v_attempt_history IS 'Every attempt with the attempts on its path. The steps of `attempt_id` up to `last_step` (NULL: all) belong to the history of `history_id`.';

CREATE VIEW rft.v_consumption AS
SELECT r.name AS run, r.run_id, d.draw_id, d.attempt_id, d.trainer_step, d.slot, d.item_kind, d.item_id, e.group_id, d.experience_id, d.reward_used,
       d.staleness,
       (SELECT min(c.checkpoint_id) FROM rft.checkpoint c
        WHERE c.attempt_id = d.attempt_id AND c.trainer_step >= d.trainer_step) AS checkpoint_id
FROM rft.run r
JOIN rft.v_attempt_history h ON h.history_id = r.current_attempt_id
JOIN rft.draw d ON d.attempt_id = h.attempt_id AND (h.last_step IS NULL OR d.trainer_step <= h.last_step)
LEFT JOIN rft.experience e ON e.experience_id = d.experience_id
WHERE EXISTS (SELECT FROM rft.checkpoint c WHERE c.attempt_id = d.attempt_id AND c.trainer_step >= d.trainer_step);
COMMENT ON VIEW rft.v_consumption IS 'Draws at or before a committed checkpoint of their run''s current history: the rows that the weights on disk were trained on.';

-- A verdict does not count for an experience that was corrected since, nor for one of a group that awaits a new verdict and was dropped whole by one
-- stage, which may have compared its experiences.
CREATE VIEW rft.v_left_out AS
SELECT v.experience_id, v.group_id, g.run_id, v.stage, rft.general_reason(v.reason) AS reason
FROM rft.verdict v
JOIN rft.rollout_group g ON g.group_id = v.group_id AND g.decided_by = v.newest_of
WHERE NOT v.kept
  AND NOT EXISTS (SELECT FROM rft.label l WHERE l.experience_id = v.experience_id AND l.label_id > v.label_cut)
  AND NOT (g.status = 'sealed' AND NOT EXISTS (
      SELECT FROM rft.verdict o WHERE o.group_id = v.group_id AND o.newest_of = v.newest_of AND o.stage IS DISTINCT FROM v.stage));
COMMENT ON VIEW rft.v_left_out IS 'Experiences that the chain of their run dropped, with the stage and the reason (without ids of rows): what pairs and stored selections leave out by default. Without those that were corrected since.';

-- Everything is joined from outside and at most once, by unique indexes or in aggregates: a query that reads nothing of a table does not read
-- it, and one that does reads the whole of it once if it reads many experiences (docs/decisions/0037). OFFSET 0: the draws of an experience are found by its id. Before the first
-- statistics of a growing buffer, the planner would also look through the draws of the whole attempt for each experience.
CREATE VIEW rft.v_experience AS
SELECT e.experience_id, r.name AS run, e.run_id, t.taskset, t.task_key, e.group_id, g.explore_step, ro.rollout_index, e.turn_index,
       ro.outcome, gp.prompt, e.response, t.payload ->> 'answer' AS answer,
       e.reward_sampled, e.reward, v.reward AS reward_shaped,
       CASE WHEN e.reward_final THEN e.reward ELSE coalesce(v.reward, e.reward) END AS reward_trained, b.reward AS baseline_reward,
       e.reward_parts, e.metrics, e.finish_reason, e.num_prompt_tokens, e.num_response_tokens,
       p.trainer_step AS policy_step, e.policy_version_min, e.policy_version_max,
       rft.state(g.status, u.times_sampled, v.kept, g.trainable) AS state,
       v.stage AS dropped_by, coalesce(v.reason, g.closed_reason) AS dropped_because,
       coalesce(u.times_sampled, 0)::bigint AS times_sampled, d.steps AS trainer_steps, l.num_labels,
       e.source, rft.chat(gp.messages, e.response_messages, e.response) AS messages, e.parent_id, e.segment_id, e.segment_row, e.created_at, e.response_hash
FROM rft.experience e
JOIN rft.run r USING (run_id)
JOIN rft.rollout_group g USING (group_id)
LEFT JOIN rft.rollout ro ON ro.rollout_id = e.rollout_id
LEFT JOIN rft.task t ON t.task_id = g.task_id
LEFT JOIN rft.group_prompt gp ON gp.group_id = e.group_id AND gp.prompt_digest = e.prompt_digest
LEFT JOIN rft.group_baseline b ON b.group_id = e.group_id
LEFT JOIN rft.policy_version p ON p.policy_version_id = e.policy_version_min
LEFT JOIN rft.verdict v ON v.experience_id = e.experience_id AND v.newest_of = g.decided_by
LEFT JOIN rft.draw u ON u.newest_of = e.experience_id
LEFT JOIN LATERAL (
    SELECT array_agg(d.trainer_step ORDER BY d.trainer_step) AS steps
    FROM (SELECT * FROM rft.draw WHERE experience_id = e.experience_id OFFSET 0) d
    JOIN rft.v_attempt_history h ON h.history_id = r.current_attempt_id AND h.attempt_id = d.attempt_id
        AND (h.last_step IS NULL OR d.trainer_step <= h.last_step)) d ON true
LEFT JOIN LATERAL (
    SELECT count(*) AS num_labels FROM rft.label l WHERE l.experience_id = e.experience_id) l ON true;
COMMENT ON VIEW rft.v_experience IS 'Experiences with their run, task, group, verdict, draws and labels.';

CREATE VIEW rft.v_group AS
SELECT g.group_id, r.name AS run, g.run_id, t.taskset, t.task_key, g.explore_step, g.ordinal, rft.state(g.status, s.times_sampled, s.kept, g.trainable) AS state, g.is_refill, g.trainable,
       g.closed_reason, g.group_size, o.num_ok, o.num_failed, o.mean_reward, o.std_reward, b.reward AS baseline_reward, g.planned_at, g.sealed_at, g.ready_at
FROM rft.rollout_group g
JOIN rft.run r USING (run_id)
JOIN rft.task t USING (task_id)
LEFT JOIN rft.group_baseline b ON b.group_id = g.group_id
LEFT JOIN LATERAL (
    SELECT count(*) FILTER (WHERE outcome = 'ok') AS num_ok, count(*) FILTER (WHERE outcome <> 'ok') AS num_failed,
           avg(reward) AS mean_reward, stddev_samp(reward) AS std_reward
    FROM rft.rollout WHERE group_id = g.group_id) o ON true
LEFT JOIN LATERAL (
    SELECT max(u.times_sampled) AS times_sampled, bool_or(v.kept) AS kept
    FROM rft.experience e
    LEFT JOIN rft.verdict v ON v.experience_id = e.experience_id AND v.newest_of = g.decided_by
    LEFT JOIN rft.draw u ON u.newest_of = e.experience_id
    WHERE e.group_id = g.group_id) s ON true;
COMMENT ON VIEW rft.v_group IS 'Groups with the outcomes of their rollouts. state: like that of their experiences; drawn if one was, dropped if all were.';

CREATE VIEW rft.v_pass_rate AS
SELECT r.name AS run, g.run_id, t.taskset, g.explore_step, count(DISTINCT g.group_id) AS num_groups, count(*) AS num_rollouts,
       avg(o.reward) AS mean_reward, avg((o.reward >= 1)::integer)::double precision AS pass_rate
FROM rft.rollout_group g
JOIN rft.run r USING (run_id)
JOIN rft.task t USING (task_id)
JOIN rft.rollout o USING (group_id)
GROUP BY r.name, g.run_id, t.taskset, g.explore_step;
COMMENT ON VIEW rft.v_pass_rate IS 'Sampled rewards by run, taskset and explorer step, including dropped groups.';

CREATE VIEW rft.v_lineage AS
SELECT d.experience_id, r.name AS run, d.attempt_id, d.trainer_step, d.reward_used, e.reward AS reward_now,
       d.reward_used IS DISTINCT FROM coalesce(CASE WHEN e.reward_final THEN e.reward END, v.reward, e.reward) AS corrected_since,
       c.checkpoint_id, c.trainer_step AS checkpoint_step, c.uri AS checkpoint_uri
FROM rft.draw d
JOIN rft.run_attempt a USING (attempt_id)
JOIN rft.run r USING (run_id)
JOIN rft.experience e USING (experience_id)
JOIN rft.rollout_group g ON g.group_id = e.group_id
LEFT JOIN rft.verdict v ON v.experience_id = e.experience_id AND v.newest_of = g.decided_by
LEFT JOIN LATERAL (
    SELECT * FROM rft.checkpoint c WHERE c.attempt_id = d.attempt_id AND c.trainer_step >= d.trainer_step
    ORDER BY c.trainer_step LIMIT 1) c ON true;
COMMENT ON VIEW rft.v_lineage IS 'Experiences with the steps that used them and the first checkpoint that contains those. corrected_since: the reward changed after the draw.';

CREATE VIEW rft.v_waiting AS
SELECT w.worker_id, r.name AS run, w.role, w.host, w.pid, w.state, w.waiting_for, w.progress, w.error,
       CASE WHEN w.stopped_at IS NOT NULL THEN 'stopped'
            WHEN w.heartbeat_at < rft.clock() - interval '15 s' THEN 'lost'
            ELSE 'alive' END AS liveness,
       extract(epoch FROM rft.clock() - w.heartbeat_at)::double precision AS heartbeat_age_s, w.started_at, w.stopped_at
FROM rft.worker w JOIN rft.run r USING (run_id);
COMMENT ON VIEW rft.v_waiting IS 'What each process does or waits for.';

-- A fork's curve begins with its parent's steps. They belong to the run whose history contains them, not to the run that trained them.
CREATE VIEW rft.v_train_step AS
SELECT r.name AS run, r.run_id, s.trainer_step, s.attempt_id, s.outcome, s.reason, s.num_groups, s.num_experiences, s.num_tokens,
       s.wait_seconds, s.train_seconds, s.publish_seconds, s.metrics, s.finished_at
FROM rft.run r
JOIN rft.v_attempt_history h ON h.history_id = r.current_attempt_id
JOIN rft.train_step s ON s.attempt_id = h.attempt_id AND (h.last_step IS NULL OR s.trainer_step <= h.last_step);
COMMENT ON VIEW rft.v_train_step IS 'The steps of a run''s current history: one continuous curve, even across crashes.';

CREATE VIEW rft.v_dropped AS
SELECT r.name AS run, g.run_id, v.stage, v.reason, count(*) AS num_experiences, count(DISTINCT v.group_id) AS num_groups
FROM rft.verdict v
JOIN rft.rollout_group g ON g.group_id = v.group_id AND g.decided_by = v.newest_of
JOIN rft.run r ON r.run_id = g.run_id
WHERE NOT v.kept
GROUP BY r.name, g.run_id, v.stage, v.reason;
COMMENT ON VIEW rft.v_dropped IS 'Dropped experiences by stage and reason, according to the newest verdicts of the pipeline that decided.';

CREATE VIEW rft.v_task AS
SELECT t.task_id, t.taskset, t.task_key, t.status, t.status_pinned, t.payload -> 'prompt' AS prompt, t.payload ->> 'answer' AS answer,
       t.payload -> 'metadata' AS metadata, t.features, coalesce(t.source_features, t.features) AS source_features,
       v.kept, v.stage, v.reason, v.pipeline_version, v.decided_at, t.created_at, t.manual_features, t.left_source_at
FROM rft.task t LEFT JOIN rft.task_verdict v ON v.task_verdict_id = t.task_verdict_id;
COMMENT ON VIEW rft.v_task IS 'Tasks with their current verdict: kept, or dropped with the stage and the reason.';

CREATE VIEW rft.v_dropped_task AS
SELECT t.taskset, v.pipeline_version, v.stage, v.reason, count(*) AS num_tasks
FROM rft.task t JOIN rft.task_verdict v ON v.task_verdict_id = t.task_verdict_id
WHERE NOT v.kept
GROUP BY t.taskset, v.pipeline_version, v.stage, v.reason;
COMMENT ON VIEW rft.v_dropped_task IS 'Tasks dropped by their current verdicts, by stage and reason.';

CREATE VIEW rft.v_task_stat AS
SELECT r.name AS run, s.run_id, t.taskset, t.task_key, s.task_id, t.status, s.alpha / (s.alpha + s.beta) AS pass_rate, s.alpha, s.beta,
       s.attempts, s.mean_reward, s.last_selected_at, t.features
FROM rft.task_stat s
JOIN rft.run r USING (run_id)
JOIN rft.task t USING (task_id);
COMMENT ON VIEW rft.v_task_stat IS 'Statistics of the tasks that runs tried. pass_rate: the expected rate; 0.5 for a task without outcomes. mean_reward: mean of the outcomes alone.';

CREATE VIEW rft.v_review AS
SELECT w.*, CASE WHEN w.answer IS NOT NULL AND w.answered_at < w.deadline THEN w.answer::text
                 WHEN rft.clock() >= w.deadline THEN w.otherwise::text ELSE 'waiting' END AS state
FROM rft.review w;
COMMENT ON VIEW rft.v_review IS 'Questions with their current state: waiting, pass or drop. An answer after the deadline does not count.';

CREATE VIEW rft.v_review_queue AS
SELECT w.review_id, w.experience_id, w.group_id, r.name AS run, w.name, w.question, w.deadline, w.otherwise,
       extract(epoch FROM w.deadline - rft.clock())::double precision AS seconds_left, gp.prompt, e.response, e.reward, w.asked_at
FROM rft.review w JOIN rft.run r USING (run_id) JOIN rft.experience e USING (experience_id)
JOIN rft.rollout_group g ON g.group_id = w.group_id
LEFT JOIN rft.group_prompt gp ON gp.group_id = e.group_id AND gp.prompt_digest = e.prompt_digest
WHERE w.answer IS NULL AND rft.clock() < w.deadline AND g.status = 'sealed' AND g.left_by IS NULL
ORDER BY w.deadline, w.review_id;
COMMENT ON VIEW rft.v_review_queue IS 'Questions that wait for a person, most urgent first. Questions about groups that were purged, left or decided without an answer are left out. Answer with UPDATE rft.review SET answer, UPDATE rft.experience SET reward, `rft label set` or `rft label import`.';

CREATE VIEW rft.v_run_model AS
SELECT r.name AS run, m.run_id, m.used_as, m.uri, m.checkpoint_id, f.name AS trained_by, c.trainer_step, m.since
FROM rft.run_model m JOIN rft.run r USING (run_id)
LEFT JOIN rft.checkpoint c ON c.checkpoint_id = m.checkpoint_id
LEFT JOIN rft.run f ON f.run_id = c.run_id;
COMMENT ON VIEW rft.v_run_model IS 'The models of each run: the weights that it starts from, and its critic, teacher and reward models. trained_by, trainer_step: the run and the step of the checkpoint; NULL for a model from elsewhere.';

-- A pair with a purged side shows no text, and cannot be trained on.
CREATE VIEW rft.v_pair AS
SELECT p.pair_id, r.name AS run, c.run_id, c.group_id, t.taskset, t.task_key, p.source, p.author, p.session_user_name, p.chosen_id, p.rejected_id,
       gp.prompt, c.response AS chosen, j.response AS rejected, c.reward AS chosen_reward, j.reward AS rejected_reward,
       CASE p.source WHEN 'human' THEN p.margin ELSE c.reward - j.reward END AS margin,
       (p.source = 'human' OR coalesce(c.reward > j.reward, false))
           AND NOT EXISTS (SELECT FROM rft.purged_experience x WHERE x.experience_id IN (p.chosen_id, p.rejected_id)) AS stands,
       c.num_response_tokens AS chosen_tokens, j.num_response_tokens AS rejected_tokens,
       c.finish_reason AS chosen_finish_reason, j.finish_reason AS rejected_finish_reason,
       rft.state(g.status, cu.times_sampled, cv.kept, g.trainable) AS chosen_state,
       rft.state(jg.status, ju.times_sampled, jv.kept, jg.trainable) AS rejected_state, p.builder, p.label_cut, p.created_at
FROM rft.preference_pair p
JOIN rft.experience c ON c.experience_id = p.chosen_id
JOIN rft.experience j ON j.experience_id = p.rejected_id
JOIN rft.run r ON r.run_id = c.run_id
JOIN rft.rollout_group g ON g.group_id = c.group_id
JOIN rft.task t USING (task_id)
JOIN rft.rollout_group jg ON jg.group_id = j.group_id
LEFT JOIN rft.verdict cv ON cv.experience_id = c.experience_id AND cv.newest_of = g.decided_by
LEFT JOIN rft.verdict jv ON jv.experience_id = j.experience_id AND jv.newest_of = jg.decided_by
LEFT JOIN rft.draw cu ON cu.newest_of = c.experience_id
LEFT JOIN rft.draw ju ON ju.newest_of = j.experience_id
LEFT JOIN rft.group_prompt gp ON gp.group_id = c.group_id AND gp.prompt_digest = c.prompt_digest;
COMMENT ON VIEW rft.v_pair IS 'Preference pairs with their texts, their current rewards, and how each answer ended and what became of it. margin: the current difference of the rewards for a built pair; the person''s value, or NULL, for a person''s pair. stands: false if a correction removed the difference on which a pair was built, or if one of the two was purged.';

CREATE VIEW rft.v_purged AS
SELECT x.experience_id, p.purge_id, p.kind, p.selection, p.reason, p.author, p.session_user_name, x.purged_at
FROM rft.purged_experience x JOIN rft.purge p USING (purge_id);
COMMENT ON VIEW rft.v_purged IS 'Purged experiences, with the author, time and reason.';
