-- name: rollouts_to_show (read)
-- Rollouts with their group, run and task, and the experiences that are stored of them, in the order of their first turns.
SELECT o.rollout_id, o.group_id, r.run_id, r.name AS run, t.taskset, t.task_key, t.payload ->> 'answer' AS answer, g.explore_step, g.group_size,
       o.rollout_index, o.outcome::text AS outcome, o.stop_reason::text AS stop_reason, o.reward, o.num_turns, o.seconds, o.error, coalesce(o.tries, '[]') AS tries,
       coalesce((SELECT array_agg(e.experience_id ORDER BY e.turn_index, e.experience_id) FROM rft.experience e
                 WHERE e.group_id = o.group_id AND e.rollout_id = o.rollout_id), '{}') AS experience_ids
FROM rft.rollout o
JOIN rft.rollout_group g USING (group_id)
JOIN rft.run r USING (run_id)
LEFT JOIN rft.task t USING (task_id)
WHERE o.rollout_id = ANY (%(rollout_ids)s)
ORDER BY o.rollout_index, o.rollout_id;

-- name: rollout_of_experience (read)
-- The rollout that an experience belongs to.
SELECT rollout_id FROM rft.experience WHERE experience_id = %(experience_id)s;

-- name: group_to_show (read)
-- A group with its rollouts.
SELECT v.group_id, v.run, v.run_id, v.taskset, v.task_key, t.payload ->> 'answer' AS answer, v.explore_step, v.group_size, v.state, v.closed_reason, v.num_ok,
       v.num_failed, v.mean_reward, v.std_reward, v.baseline_reward,
       ARRAY(SELECT o.rollout_id FROM rft.rollout o WHERE o.group_id = v.group_id ORDER BY o.rollout_index, o.rollout_id) AS rollout_ids
FROM rft.v_group v
JOIN rft.rollout_group g USING (group_id)
JOIN rft.task t USING (task_id)
WHERE v.group_id = %(group_id)s;

-- name: turn_rewards_to_show (read)
-- The rewards of the turns of experiences.
SELECT experience_id, turn, reward_sampled, reward FROM rft.turn_reward WHERE experience_id = ANY (%(experience_ids)s) ORDER BY experience_id, turn;

-- name: labels_to_show (read)
-- The labels of experiences and of their turns, oldest first.
SELECT experience_id, turn, old_value, new_value, author, source::text AS source, reason, final, labelled_at
FROM rft.label WHERE experience_id = ANY (%(experience_ids)s) ORDER BY label_id;

-- name: annotations_to_show (read)
-- Annotations that stand about targets of one sort, oldest first.
SELECT target_id, annotation_id, kind, value, source::text AS source, author, confidence, reason, made_at
FROM rft.v_annotation WHERE target = %(target)s::rft.label_target AND target_id = ANY (%(target_ids)s) ORDER BY annotation_id;

-- name: answers_to_show (read)
-- The answers to a question of an evaluation.
SELECT evaluation_id, run, taskset, task_key, decoding, trainer_step, num_answers, answer_index, answer, reward, reward_parts, metrics, outcome::text AS outcome,
       stop_reason::text AS stop_reason, error, num_turns, num_response_tokens, finish_reason, seconds, response, chats
FROM rft.v_evaluation_answer WHERE evaluation_id = %(evaluation_id)s AND task_key = %(task_key)s ORDER BY answer_index;

-- name: questions_to_show (read)
-- Some questions of an evaluation: those with the lowest rewards.
SELECT task_key FROM rft.v_evaluation_answer WHERE evaluation_id = %(evaluation_id)s GROUP BY task_key ORDER BY avg(reward), task_key LIMIT 5;
