-- name: report_evaluations (read)
-- Finished evaluations of the run's current history, one per purpose, taskset, decoding and step.
SELECT DISTINCT ON (e.purpose, e.taskset, e.decoding, e.trainer_step)
       e.evaluation_id, e.purpose, e.taskset, e.decoding, e.trainer_step, e.checksum, e.num_answers, a.num_questions, a.mean, a.standard_error,
       a.num_tokens, e.error
FROM rft.run r
JOIN rft.v_attempt_history h ON h.history_id = r.current_attempt_id
JOIN rft.policy_version p ON p.attempt_id = h.attempt_id AND (h.last_step IS NULL OR p.trainer_step <= h.last_step)
JOIN rft.evaluation e ON e.policy_version_id = p.policy_version_id AND e.status = 'done'
CROSS JOIN LATERAL (
    SELECT count(*) AS num_questions, avg(reward) AS mean, stddev_samp(reward) / sqrt(count(*)) AS standard_error,
           coalesce(sum(num_tokens), 0)::bigint AS num_tokens
    FROM (SELECT avg(reward) AS reward, sum(num_response_tokens) AS num_tokens FROM rft.evaluation_answer
          WHERE evaluation_id = e.evaluation_id GROUP BY task_id) q) a
WHERE r.run_id = %(run_id)s AND a.num_questions > 0
ORDER BY e.purpose, e.taskset, e.decoding, e.trainer_step, e.evaluation_id DESC;

-- name: report_paired (read)
-- Compare two evaluations question by question: each question counts with the mean of its answers.
WITH b AS (SELECT task_id, avg(reward) AS reward FROM rft.evaluation_answer WHERE evaluation_id = %(before)s GROUP BY task_id),
a AS (SELECT task_id, avg(reward) AS reward FROM rft.evaluation_answer WHERE evaluation_id = %(after)s GROUP BY task_id)
SELECT count(*) AS num_questions, avg(b.reward) AS before, avg(a.reward) AS after, avg(a.reward - b.reward) AS difference,
       stddev_samp(a.reward - b.reward) / sqrt(count(*)) AS standard_error,
       count(*) FILTER (WHERE a.reward > b.reward) AS num_better, count(*) FILTER (WHERE a.reward < b.reward) AS num_worse,
       (SELECT count(*) FROM b) - count(*) AS num_only_before, (SELECT count(*) FROM a) - count(*) AS num_only_after
FROM b JOIN a USING (task_id);

-- name: report_answers (read)
-- The rewards of each question of evaluations, in the order of its answers.
SELECT evaluation_id, task_id, array_agg(reward ORDER BY answer_index) AS rewards FROM rft.evaluation_answer
WHERE evaluation_id = ANY (%(evaluation_ids)s) GROUP BY evaluation_id, task_id ORDER BY evaluation_id, task_id;

-- name: report_train_curve (read)
-- Sampled rewards by explorer step, including groups dropped later.
SELECT g.explore_step AS step, count(o.reward) AS num, avg(o.reward) AS mean, avg((o.reward >= 1)::integer)::double precision AS pass_rate,
       stddev_samp(o.reward) / sqrt(nullif(count(o.reward), 0)) AS standard_error
FROM rft.rollout_group g JOIN rft.rollout o USING (group_id)
WHERE g.run_id = %(run_id)s GROUP BY g.explore_step HAVING count(o.reward) > 0 ORDER BY g.explore_step;

-- name: report_reward_parts (read)
-- The parts of sampled rewards by explorer step, each rollout once.
SELECT g.explore_step AS step, p.name, count(*) AS num, avg(p.value::float8) AS mean, stddev_samp(p.value::float8) / sqrt(count(*)) AS standard_error
FROM (SELECT DISTINCT ON (rollout_id) group_id, reward_parts FROM rft.experience
      WHERE run_id = %(run_id)s AND rollout_id IS NOT NULL ORDER BY rollout_id, experience_id) e
JOIN rft.rollout_group g USING (group_id)
CROSS JOIN LATERAL jsonb_each(e.reward_parts) AS p (name, value)
WHERE jsonb_typeof(p.value) = 'number' GROUP BY g.explore_step, p.name ORDER BY p.name, g.explore_step;

-- name: report_steps (read)
-- Totals of a run's steps. A fork's history begins with steps of its parent (`before_fork`). Their groups, tokens and seconds are the
-- parent's, so the fork's own seconds add up to no more than the time in which it worked. with_expert_loss: steps of an algorithm with a
-- loss for an expert's experiences; without_experts: those of them that had none.
SELECT count(*) FILTER (WHERE s.outcome = 'trained') AS trained, count(*) FILTER (WHERE s.outcome = 'skipped') AS skipped,
       count(*) FILTER (WHERE s.outcome = 'trained' AND (s.metrics ->> 'grad_norm')::float8 = 0) AS without_gradient,
       count(*) FILTER (WHERE s.metrics ? 'expert_sequences') AS with_expert_loss,
       count(*) FILTER (WHERE (s.metrics ->> 'expert_sequences')::float8 = 0) AS without_experts,
       count(*) FILTER (WHERE NOT o.own) AS before_fork, coalesce(sum(s.num_groups) FILTER (WHERE o.own), 0)::bigint AS num_groups,
       coalesce(sum(s.num_tokens) FILTER (WHERE o.own), 0)::bigint AS num_tokens,
       coalesce(sum(s.wait_seconds) FILTER (WHERE o.own), 0) AS wait_seconds,
       coalesce(sum(s.train_seconds) FILTER (WHERE o.own), 0) AS train_seconds,
       coalesce(sum(s.publish_seconds) FILTER (WHERE o.own), 0) AS publish_seconds
FROM rft.v_train_step s
JOIN rft.run_attempt a ON a.attempt_id = s.attempt_id
CROSS JOIN LATERAL (SELECT a.run_id = s.run_id AS own) o
WHERE s.run_id = %(run_id)s;

-- name: report_sandboxes (read)
-- What confined the code of models in the explorers of a run.
SELECT DISTINCT progress ->> 'sandbox' AS tier FROM rft.worker WHERE run_id = %(run_id)s AND progress ? 'sandbox' ORDER BY 1;

-- name: report_metrics (read)
-- Some metrics of each step of a run, where it has them.
SELECT n.name, s.trainer_step AS step, (s.metrics ->> n.name)::float8 AS value
FROM rft.v_train_step s CROSS JOIN unnest(%(names)s::text[]) AS n (name)
WHERE s.run_id = %(run_id)s AND s.metrics ->> n.name IS NOT NULL ORDER BY n.name, s.trainer_step;

-- name: report_skipped (read)
-- Reasons why steps of a run were skipped, most frequent first.
SELECT coalesce(reason, 'no reason given') AS reason, count(*) AS num_steps FROM rft.v_train_step
WHERE run_id = %(run_id)s AND outcome = 'skipped' GROUP BY 1 ORDER BY 2 DESC;

-- name: report_tokens (read)
-- Number of experiences and of their turns, tokens sampled, and tokens between answers. A forked run's copies have a parent: they were sampled by the run that it was forked from.
SELECT count(*) AS num_experiences,
       coalesce(sum(num_trained_tokens) FILTER (WHERE source = 'explorer' AND parent_id IS NULL), 0)::bigint AS sampled_tokens,
       coalesce(sum(num_turns), 0)::bigint AS num_turns, coalesce(sum(num_response_tokens - num_trained_tokens), 0)::bigint AS observed_tokens
FROM rft.experience WHERE run_id = %(run_id)s;

-- name: report_forks (read)
-- Sequences of a run that begin anew in their rollouts, by cause, most frequent first.
SELECT fork::text AS cause, count(*) AS num FROM rft.experience WHERE run_id = %(run_id)s AND fork IS NOT NULL GROUP BY fork ORDER BY 2 DESC, 1;

-- name: report_outcomes (read)
-- Outcomes of the rollouts of a run.
SELECT o.outcome::text AS outcome, count(*) AS num FROM rft.rollout o JOIN rft.rollout_group g USING (group_id)
WHERE g.run_id = %(run_id)s GROUP BY o.outcome ORDER BY o.outcome;

-- name: report_failures (read)
-- Errors of failed rollouts, one of each kind, most frequent first. Errors of one kind differ only in numbers and quoted names.
SELECT min(coalesce(o.error, 'no error recorded')) AS error, count(*) AS num FROM rft.rollout o JOIN rft.rollout_group g USING (group_id)
WHERE g.run_id = %(run_id)s AND o.outcome IN ('failed', 'timeout')
GROUP BY regexp_replace(coalesce(o.error, 'no error recorded'), $re$[0-9]+|'[^']*'$re$, '#', 'g') ORDER BY 2 DESC, 1 LIMIT 10;

-- name: report_closed (read)
-- Reasons of closed groups. Steps and row ids are removed, because they would make every reason unique.
SELECT CASE WHEN aged_out THEN 'aged out' ELSE rft.general_reason(coalesce(closed_reason, 'no reason given')) END AS reason, count(*) AS num_groups
FROM rft.rollout_group
WHERE run_id = %(run_id)s AND NOT trainable GROUP BY 1 ORDER BY 2 DESC, 1;

-- name: report_dropped (read)
-- Like rft.v_dropped, but reasons that differ only in the rows they name count as one.
SELECT coalesce(stage, '–') AS stage, rft.general_reason(coalesce(reason, '–')) AS reason,
       count(*) AS num_experiences, count(DISTINCT v.group_id) AS num_groups
FROM rft.verdict v JOIN rft.rollout_group g ON g.group_id = v.group_id AND g.decided_by = v.newest_of
WHERE g.run_id = %(run_id)s AND NOT v.kept GROUP BY 1, 2 ORDER BY num_experiences DESC, stage, reason;

-- name: report_receipts (read)
-- Weights that went straight into engines, by what running requests did with their KV cache. num: receipts, one per transfer and engine.
SELECT p.kv_cache::text AS kv_cache, count(*) FILTER (WHERE p.status = 'applied') AS num_applied,
       count(*) FILTER (WHERE p.status = 'failed') AS num_failed,
       avg(p.pause_seconds) FILTER (WHERE p.status = 'applied') AS mean_pause_s,
       max(p.pause_seconds) FILTER (WHERE p.status = 'applied') AS max_pause_s
FROM rft.weight_receipt p JOIN rft.weight_transfer t USING (transfer_id)
WHERE t.run_id = %(run_id)s GROUP BY p.kv_cache ORDER BY p.kv_cache;

-- name: report_checkpoints (read)
-- Checkpoints of the current history whose files still exist.
SELECT DISTINCT ON (c.trainer_step) c.trainer_step, c.uri FROM rft.run r
JOIN rft.v_attempt_history h ON h.history_id = r.current_attempt_id
JOIN rft.checkpoint c ON c.attempt_id = h.attempt_id AND (h.last_step IS NULL OR c.trainer_step <= h.last_step)
WHERE r.run_id = %(run_id)s AND c.deleted_at IS NULL
ORDER BY c.trainer_step, c.checkpoint_id DESC;

-- name: report_activities (read)
-- Seconds of each role of a run by activity, the longest first.
SELECT w.role::text AS role, s.activity, sum(extract(epoch FROM s.ended_at - s.started_at))::double precision AS seconds
FROM rft.worker w JOIN rft.worker_span s USING (worker_id)
WHERE w.run_id = %(run_id)s AND w.role IN ('trainer', 'explorer', 'pipeline') GROUP BY 1, 2 ORDER BY w.role::text, 3 DESC;

-- name: run_spans (read)
-- What the workers of a run did when, in seconds since 1970.
SELECT w.worker_id, w.role::text AS role, w.host, w.pid, s.activity, s.detail,
       extract(epoch FROM s.started_at)::double precision AS started, extract(epoch FROM s.ended_at)::double precision AS ended
FROM rft.worker w JOIN rft.worker_span s USING (worker_id)
WHERE w.run_id = %(run_id)s AND w.role <> 'supervisor' ORDER BY w.worker_id, s.ordinal;
