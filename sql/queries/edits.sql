-- name: edits_to_render (read)
-- Standing edits of a run's experiences that no experience renders yet, after a given one, with what their parents' chats were.
-- Without those of the given kinds.
SELECT v.annotation_id, v.parent_id, v.response, v.author, e.num_prompt_tokens, e.role, gp.prompt,
       rft.chat(gp.messages, e.response_messages, e.response) AS messages, t.taskset, t.task_key
FROM rft.v_edit v
JOIN rft.experience e ON e.experience_id = v.parent_id
JOIN rft.rollout_group g ON g.group_id = e.group_id
JOIN rft.task t USING (task_id)
LEFT JOIN rft.group_prompt gp ON gp.group_id = e.group_id AND gp.prompt_digest = e.prompt_digest
WHERE v.run_id = %(run_id)s AND v.experience_id IS NULL AND v.annotation_id > %(after)s AND v.kind <> ALL (%(without_kinds)s::text[])
  AND NOT EXISTS (SELECT FROM rft.purged_experience x WHERE x.experience_id = v.parent_id)
ORDER BY v.annotation_id LIMIT %(limit)s;

-- name: waiting_edits_of_blind_kinds (read)
-- Blind kinds, with the number of standing edits of a run's experiences that no experience renders yet.
SELECT k.kind, (SELECT count(*) FROM rft.v_edit v WHERE v.kind = k.kind AND v.run_id = %(run_id)s AND v.experience_id IS NULL
                  AND NOT EXISTS (SELECT FROM rft.purged_experience x WHERE x.experience_id = v.parent_id)) AS num
FROM unnest(rft.blind_kinds()) AS k (kind);
