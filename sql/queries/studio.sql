-- name: studio_rights (read)
-- What the account of a session may do; also for an account that may not even read.
SELECT session_user::text AS account,
       has_schema_privilege('rft', 'USAGE') AND has_table_privilege('rft.experience', 'SELECT') AS may_read,
       has_schema_privilege('rft', 'USAGE') AND has_column_privilege('rft.experience', 'reward', 'UPDATE') AS may_label;

-- name: studio_items (read)
-- What a person needs to judge experiences, with the newest label of each.
SELECT e.experience_id, e.group_id, e.rollout_id, r.name AS run, t.taskset, t.task_key, t.payload ->> 'answer' AS answer, gp.prompt, e.response,
       rft.chat(gp.messages, e.response_messages, e.response) AS messages, e.reward, e.reward_parts, e.finish_reason, e.num_response_tokens,
       (SELECT max(l.label_id) FROM rft.label l WHERE l.experience_id = e.experience_id AND l.turn IS NULL) AS label_id
FROM rft.experience e
JOIN rft.run r USING (run_id)
JOIN rft.rollout_group g USING (group_id)
LEFT JOIN rft.task t ON t.task_id = g.task_id
LEFT JOIN rft.group_prompt gp ON gp.group_id = e.group_id AND gp.prompt_digest = e.prompt_digest
WHERE e.experience_id = ANY (%(experience_ids)s);

-- name: studio_runs_with_reviews (read)
-- Runs with questions that wait for a person, to choose one.
SELECT r.run_id, r.name FROM rft.run r
WHERE EXISTS (SELECT FROM rft.review w WHERE w.run_id = r.run_id AND w.answer IS NULL AND w.deadline > rft.clock()) ORDER BY r.run_id DESC LIMIT 50;

-- name: studio_group (read)
-- The experiences of a group side by side, those of one rollout after each other.
SELECT experience_id, rollout_id, rollout_index, turn_index, role, response, messages, prompt, reward, reward_shaped, state, dropped_by, dropped_because, num_labels,
       finish_reason, num_response_tokens, source::text AS source
FROM rft.v_experience WHERE group_id = %(group_id)s ORDER BY rollout_index NULLS LAST, turn_index, experience_id;
