-- name: label_settings
-- Set the author, the reason and the source of labels until the transaction ends. The trigger on rft.experience reads them.
SELECT set_config('rft.author', %(author)s, true), set_config('rft.reason', %(reason)s, true),
       set_config('rft.label_source', %(source)s, true), set_config('rft.label_batch', %(label_batch_id)s, true);

-- name: sql_settings
-- Settings of a session in which a person writes SQL, and of no other session: the author of labels, and the search path.
SELECT set_config('rft.author', %(author)s, false), set_config('search_path', 'rft, public', false);

-- name: begin_label_batches
-- Begin batches of labels; return their ids.
SELECT rft.begin_label_batches(%(num)s) AS label_batch_id;

-- name: label_lock_experiences
-- Lock experiences in one order, so that two batches over the same rows wait for each other instead of deadlocking.
SELECT experience_id, group_id FROM rft.experience WHERE experience_id = ANY (%(experience_ids)s)
ORDER BY experience_id FOR UPDATE;

-- name: lock_groups_and_reviews
-- Lock everything that a batch of labels touches at once, because the batch is written in several statements.
SELECT rft.lock_groups_and_reviews(%(group_ids)s::bigint[]);

-- name: label_set_rewards
-- Set rewards. Rows that already have the value are left alone: repeating it is no new label.
UPDATE rft.experience e SET reward = n.reward, reward_final = n.final
FROM unnest(%(experience_ids)s::bigint[], %(rewards)s::double precision[], %(finals)s::boolean[]) AS n (experience_id, reward, final)
WHERE e.experience_id = n.experience_id AND (e.reward, e.reward_final) IS DISTINCT FROM (n.reward, n.final);

-- name: label_lock_turns
-- Lock the rewards of turns in one order, before the groups of their experiences, as an UPDATE by SQL does.
SELECT t.experience_id, t.turn, e.group_id
FROM (SELECT * FROM unnest(%(experience_ids)s::bigint[], %(turns)s::integer[]) AS u (experience_id, turn) ORDER BY 1, 2) n
CROSS JOIN LATERAL (
    SELECT experience_id, turn FROM rft.turn_reward WHERE experience_id = n.experience_id AND turn = n.turn FOR UPDATE) t
CROSS JOIN LATERAL (SELECT group_id FROM rft.experience WHERE experience_id = t.experience_id OFFSET 0) e;

-- name: turns_of_experience (read)
-- The turns of an experience that have rewards of their own; no row if the experience does not exist.
SELECT ARRAY(SELECT turn FROM rft.turn_reward t WHERE t.experience_id = e.experience_id ORDER BY turn) AS turns
FROM rft.experience e WHERE e.experience_id = %(experience_id)s;

-- name: experiences_of_rollout (read)
-- The experiences of a rollout, found by its group.
SELECT e.experience_id FROM rft.rollout o JOIN rft.experience e ON e.group_id = o.group_id AND e.rollout_id = o.rollout_id
WHERE o.rollout_id = %(rollout_id)s ORDER BY e.experience_id;

-- name: label_set_turn_rewards
-- Set rewards of turns. Rows that already have the value are left alone.
UPDATE rft.turn_reward t SET reward = n.reward
FROM unnest(%(experience_ids)s::bigint[], %(turns)s::integer[], %(rewards)s::double precision[]) AS n (experience_id, turn, reward)
WHERE t.experience_id = n.experience_id AND t.turn = n.turn AND t.reward <> n.reward;

-- name: label_batch (read)
-- The labels of one batch.
SELECT * FROM rft.label WHERE label_batch_id = %(label_batch_id)s ORDER BY label_id;

-- name: label_histories (read)
-- All labels of some experiences: of each those of its own reward and then those of each turn, in the order in which they were stored.
SELECT label_id, experience_id, turn, old_value, new_value, final, label_batch_id, reason FROM rft.label
WHERE experience_id = ANY (%(experience_ids)s) ORDER BY experience_id, turn NULLS FIRST, label_id;

-- name: label_history (read)
-- Labels, newest first; only those of an experience or batch if one is named.
SELECT label_id, experience_id, turn, old_value, new_value, final, author, session_user_name, source::text AS source, reason,
       label_batch_id, labelled_at
FROM rft.label
WHERE (%(experience_id)s::bigint IS NULL OR experience_id = %(experience_id)s)
  AND (%(label_batch_id)s::bigint IS NULL OR label_batch_id = %(label_batch_id)s)
ORDER BY label_id DESC LIMIT %(limit)s;

-- name: label_batches (read)
-- The newest batches, to find the one to undo: of rewards and of annotations.
SELECT label_batch_id, count(*) AS num_labels, min(author) AS author, min(source) AS source, min(reason) AS reason, min(labelled_at) AS labelled_at
FROM (
    SELECT label_batch_id, author, source::text AS source, reason, labelled_at FROM rft.label
    UNION ALL
    SELECT label_batch_id, coalesce(undone_by, author), CASE WHEN undone_by IS NULL THEN kind ELSE 'undo' END, reason, made_at FROM rft.annotation) l
GROUP BY label_batch_id ORDER BY label_batch_id DESC LIMIT %(limit)s;

-- name: count_open_reviews (read)
-- Number of reviews of experiences that wait for an answer.
SELECT count(*) AS n FROM rft.review WHERE experience_id = ANY (%(experience_ids)s) AND kind IS NULL AND answer IS NULL AND rft.clock() < deadline;

-- name: answer_reviews
-- Answer the open reviews of experiences with pass.
UPDATE rft.review SET answer = 'pass'
WHERE experience_id = ANY (%(experience_ids)s) AND kind IS NULL AND answer IS NULL AND rft.clock() < deadline;

-- name: review_queue (read)
-- Reviews that wait for a person, most urgent first; only those of a run if one is named.
SELECT q.* FROM rft.v_review_queue q JOIN rft.run r ON r.name = q.run
WHERE %(run_id)s::bigint IS NULL OR r.run_id = %(run_id)s
ORDER BY q.deadline, q.review_id LIMIT %(count)s;

-- name: num_open_reviews (read)
-- Number of reviews that keep groups of a run waiting.
SELECT count(*) AS n FROM rft.review w JOIN rft.rollout_group g USING (group_id)
WHERE w.run_id = %(run_id)s AND w.answer IS NULL AND rft.clock() < w.deadline AND g.status = 'sealed' AND g.left_by IS NULL;
