-- name: try_plan_lock
-- Take the right to plan groups of the run; only one transaction at a time has it.
SELECT rft.try_lock('plan', %(run_id)s) AS locked;

-- name: planning_state
-- One row per explorer step that may run now, with its groups. It is one statement, so that one snapshot sees a draw together with the
-- groups it took. A step that the current attempt has drawn needs no more groups, even if it is not finished yet.
-- due: new groups to plan for the step. taken: those that its trainer step takes. surplus: those that are to be left after it
-- (over-sampling). live: groups that can still train, neither closed nor ever drawn. spare: live groups of earlier steps,
-- counted up to `enough`, because the exact number does not matter in a large buffer.
WITH run AS (
    SELECT r.run_id, r.current_attempt_id, r.planned_steps,
           (SELECT p.trainer_step FROM rft.policy_version p
            WHERE p.run_id = r.run_id AND p.attempt_id = r.current_attempt_id ORDER BY p.policy_version_id DESC LIMIT 1) AS policy_step,
           greatest(
               coalesce((SELECT max(d.trainer_step) FROM rft.draw d WHERE d.attempt_id = r.current_attempt_id), 0),
               coalesce((SELECT max(s.trainer_step) FROM rft.train_step s WHERE s.attempt_id = r.current_attempt_id), 0),
               coalesce((SELECT c.trainer_step FROM rft.run_attempt a JOIN rft.checkpoint c ON c.checkpoint_id = a.from_checkpoint_id
                         WHERE a.attempt_id = r.current_attempt_id), 0)) AS first_step
    FROM rft.run r WHERE r.run_id = %(run_id)s AND NOT r.stop_requested),
span AS (
    SELECT *, least((policy_step / %(interval)s::integer + 1) * %(interval)s::integer - 1 + %(offset)s::integer,
                    policy_step + %(window)s::integer, planned_steps - 1) AS last_step
    FROM run WHERE policy_step IS NOT NULL)
SELECT s.current_attempt_id, s.policy_step, step AS explore_step, c.planned - c.planned_before AS due, c.taken - c.taken_before AS taken,
       c.planned - c.taken AS surplus, n.base, n.refills, n.live,
       (SELECT count(*) FROM (
            SELECT FROM rft.worklist WHERE run_id = s.run_id AND consumer = 'trainer' AND available AND times_sampled = 0
                AND lane = ANY (rft.explorer_lanes(s.run_id)) AND sort_key < s.first_step::bigint << 32 LIMIT %(enough)s) w)
     + (SELECT count(*) FROM rft.rollout_group g WHERE run_id = s.run_id AND explore_step < s.first_step AND trainable
        AND status IN ('planned', 'claimed', 'sealed') AND rft.is_paced(g)
        AND NOT EXISTS (SELECT FROM rft.worklist d WHERE d.run_id = s.run_id AND d.consumer = 'trainer' AND d.item_kind = 'group'
                        AND d.item_id = group_id AND d.times_sampled > 0)) AS spare
FROM span s
CROSS JOIN LATERAL generate_series(s.first_step, s.last_step) AS step
CROSS JOIN LATERAL (
    SELECT rft.num_planned(step + 1, %(per_step)s, %(over_sampling)s, s.planned_steps) AS planned,
           rft.num_planned(step, %(per_step)s, %(over_sampling)s, s.planned_steps) AS planned_before,
           rft.num_planned(step + 1, %(per_step)s, 0, 0) AS taken, rft.num_planned(step, %(per_step)s, 0, 0) AS taken_before) c
CROSS JOIN LATERAL (
    SELECT count(*) FILTER (WHERE NOT g.is_refill AND rft.is_paced(g)) AS base, count(*) FILTER (WHERE g.is_refill) AS refills,
           count(*) FILTER (WHERE g.trainable AND g.status <> 'abandoned' AND coalesce(w.times_sampled, 0) = 0
                            AND rft.is_paced(g)
                            AND (g.status <> 'ready' OR w.available)) AS live
    FROM rft.rollout_group g
    LEFT JOIN rft.worklist w ON w.run_id = g.run_id AND w.consumer = 'trainer' AND w.item_kind = 'group' AND w.item_id = g.group_id
    WHERE g.run_id = s.run_id AND g.explore_step = step AND g.left_by IS NULL) n
ORDER BY step;

-- name: pipeline_backlog (read)
-- Number of groups that wait for a pipeline worker, counted up to `enough`.
SELECT count(*) AS n FROM (
    SELECT FROM rft.worklist WHERE run_id = %(run_id)s AND consumer = 'pipeline' AND available LIMIT %(enough)s) w;

-- name: next_ordinal (read)
-- The ordinal of the next group of a run.
SELECT coalesce(max(ordinal), -1) + 1 AS ordinal FROM rft.rollout_group WHERE run_id = %(run_id)s;

-- name: insert_groups
-- Insert the groups of a plan, with consecutive ordinals. A group of a task that was purged since it was selected is never sampled.
WITH there AS MATERIALIZED (
    SELECT task_id FROM rft.task WHERE task_id = ANY (%(task_ids)s) AND payload <> '{"purged": true}' ORDER BY task_id FOR KEY SHARE)
INSERT INTO rft.rollout_group (run_id, attempt_id, ordinal, task_id, explore_step, group_size, is_refill, source, planned_policy_step,
    status, trainable, closed_reason)
SELECT %(run_id)s, %(attempt_id)s, %(ordinal)s + g.place - 1, g.task_id, g.explore_step, g.group_size, g.is_refill,
       %(source)s::rft.experience_source, %(planned_policy_step)s,
       CASE WHEN p.gone THEN 'abandoned' ELSE 'planned' END::rft.group_status, NOT p.gone, CASE WHEN p.gone THEN 'purged: the task' END
FROM unnest(%(task_ids)s::bigint[], %(explore_steps)s::integer[], %(group_sizes)s::integer[], %(are_refills)s::boolean[])
    WITH ORDINALITY AS g (task_id, explore_step, group_size, is_refill, place)
CROSS JOIN LATERAL (SELECT NOT EXISTS (SELECT FROM there t WHERE t.task_id = g.task_id) AS gone) p;

-- name: mark_selected
-- Record that tasks were selected now.
INSERT INTO rft.task_stat AS s (run_id, task_id, last_selected_at) SELECT %(run_id)s, unnest(%(task_ids)s::bigint[]), clock_timestamp()
ON CONFLICT (run_id, task_id) DO UPDATE SET last_selected_at = excluded.last_selected_at;

-- name: active_tasks_stamp (read)
-- A number that grows with every committed statement that changes tasks of the set.
SELECT coalesce(sum(num_changes), 0)::bigint AS stamp, count(*) AS num_rows FROM rft.task_change WHERE taskset = %(taskset)s;

-- name: compact_task_changes
-- Sum up the changes of a taskset in one row.
SELECT rft.compact_task_changes(%(taskset)s);

-- name: active_task_ids (read)
-- The ids, with the set's stamp from the same snapshot. One array, because a row per task takes several times as long.
SELECT (SELECT coalesce(sum(num_changes), 0)::bigint FROM rft.task_change WHERE taskset = %(taskset)s) AS stamp,
       coalesce((SELECT array_agg(task_id ORDER BY task_id) FROM rft.task WHERE taskset = %(taskset)s AND status = 'active'), '{}') AS task_ids;

-- name: task_numbers (read)
-- One number per active task, in id order, NULL for a task without one; with the set's stamp from the same snapshot.
SELECT (SELECT coalesce(sum(num_changes), 0)::bigint FROM rft.task_change WHERE taskset = %(taskset)s) AS stamp,
       (SELECT array_agg(CASE WHEN jsonb_typeof(features -> %(key)s) = 'number' THEN (features ->> %(key)s)::double precision END
                         ORDER BY task_id)
        FROM rft.task WHERE taskset = %(taskset)s AND status = 'active') AS numbers;

-- name: task_features (read)
-- The key and features of a task.
SELECT task_key, features FROM rft.task WHERE task_id = %(task_id)s;

-- name: newest_applied (read)
-- The newest plan in which selectors of a run learned outcomes; 0 if there is none.
SELECT coalesce(max(applied_seq), 0) AS seq FROM rft.task_observation WHERE run_id = %(run_id)s AND applied_seq IS NOT NULL;

-- name: apply_observations
-- Mark outcomes as learned. They are found by state instead of a high-water mark, so a row that commits late is not missed.
UPDATE rft.task_observation o
SET applied = true, applied_seq = %(seq)s,
    applied_in = (SELECT max(snapshot_id) FROM rft.selector_snapshot WHERE run_id = %(run_id)s)
WHERE o.run_id = %(run_id)s AND NOT o.applied;

-- name: applied_observations (read)
-- Outcomes that selectors learned after a plan, in the order of learning. corrects: the plan in which they learned the corrected outcome.
SELECT o.applied_seq AS seq, t.taskset, o.task_id, o.successes, o.trials, o.kind::text AS kind, o.ordinal,
       CASE WHEN o.kind = 'correction' THEN (
           SELECT min(e.applied_seq) FROM rft.task_observation e
           WHERE e.run_id = o.run_id AND e.task_id = o.task_id AND e.attempt_id = o.attempt_id AND e.ordinal = o.ordinal
             AND e.kind = 'explicit') END AS corrects
FROM rft.task_observation o
CROSS JOIN LATERAL (SELECT taskset FROM rft.task WHERE task_id = o.task_id OFFSET 0) t
WHERE o.run_id = %(run_id)s AND o.applied_seq > %(after)s AND o.applied_seq <= %(until)s
  AND (%(tasksets)s::text[] IS NULL OR t.taskset = ANY (%(tasksets)s))
ORDER BY o.applied_seq, o.observation_id;

-- name: planned_tasks (read)
-- Tasks of the groups planned from an ordinal on, without groups that the run has left.
SELECT task_id FROM rft.rollout_group
WHERE run_id = %(run_id)s AND ordinal >= %(from_ordinal)s AND ordinal < %(to_ordinal)s AND left_by IS NULL ORDER BY ordinal;

-- name: selector_states (read)
-- The state of a run's selectors.
SELECT taskset, selector, state FROM rft.selector_state WHERE run_id = %(run_id)s;

-- name: selector_metrics (read)
-- The metrics that a run's selectors reported with their last choice.
SELECT taskset, metrics FROM rft.selector_state WHERE run_id = %(run_id)s AND metrics <> '{}';

-- name: save_selector_states
-- Store the state and metrics of a run's selectors.
INSERT INTO rft.selector_state AS s (run_id, taskset, selector, state, metrics)
SELECT %(run_id)s, n.* FROM unnest(%(tasksets)s::text[], %(selectors)s::text[], %(states)s::jsonb[], %(metrics)s::jsonb[]) AS n
ON CONFLICT (run_id, taskset) DO UPDATE
SET selector = excluded.selector, state = excluded.state, metrics = excluded.metrics, updated_at = clock_timestamp();
