-- name: next_reviews (read)
-- Reviews without a kind that wait for a person, most urgent first, after a place in that order.
SELECT w.review_id, w.experience_id, w.group_id, w.run_id, w.name, w.question, w.otherwise::text AS otherwise, w.deadline,
       extract(epoch FROM w.deadline - rft.clock())::double precision AS seconds_left
FROM rft.review w JOIN rft.rollout_group g ON g.group_id = w.group_id
WHERE w.kind IS NULL AND w.answer IS NULL AND w.deadline > rft.clock() AND g.status = 'sealed' AND g.left_by IS NULL
  AND (w.deadline, w.review_id) > (coalesce(%(after_deadline)s::timestamptz, '-infinity'), coalesce(%(after_id)s::bigint, 0))
  AND (%(run_id)s::bigint IS NULL OR w.run_id = %(run_id)s)
ORDER BY w.deadline, w.review_id LIMIT %(count)s;

-- name: claimed_reviews (read)
-- Reviews that this account has claimed.
SELECT w.review_id, w.experience_id, w.group_id, w.run_id, w.name, w.question, w.otherwise::text AS otherwise, w.deadline,
       extract(epoch FROM w.deadline - rft.clock())::double precision AS seconds_left
FROM rft.review w WHERE w.review_id = ANY (%(review_ids)s);

-- name: review_to_answer (read)
-- A review with its answer, and the newest label of its experience.
SELECT w.review_id, w.experience_id, w.group_id, w.run_id, w.name, w.question, w.otherwise::text AS otherwise, w.deadline, w.answer::text AS answer, w.author,
       w.session_user_name, w.session_user_name = session_user AS is_own, rft.clock() >= w.deadline AS is_late, e.reward,
       extract(epoch FROM w.deadline - rft.clock())::double precision AS seconds_left,
       (SELECT max(l.label_id) FROM rft.label l WHERE l.experience_id = w.experience_id AND l.turn IS NULL) AS label_id
FROM rft.review w JOIN rft.experience e USING (experience_id) WHERE w.review_id = %(review_id)s;

-- name: newest_label (read)
-- The newest label of an experience or of its turns; NULL without any. One row.
SELECT i.experience_id, l.label_id, l.turn, l.new_value, l.label_batch_id, l.session_user_name = session_user AS is_own
FROM (SELECT %(experience_id)s::bigint AS experience_id) i
LEFT JOIN LATERAL (
    SELECT * FROM rft.label WHERE experience_id = i.experience_id ORDER BY label_id DESC LIMIT 1) l ON true;

-- name: label_by (read)
-- A label with its author, to tell whether it is one's own.
SELECT author, session_user_name = session_user AS is_own, new_value, label_batch_id FROM rft.label WHERE label_id = %(label_id)s;

-- name: rewards_of_answer (read)
-- The batch of rewards that answered a review. No row if a reward was not the answer.
SELECT l.label_batch_id,
       EXISTS (SELECT FROM rft.label o WHERE o.label_batch_id = l.label_batch_id AND o.experience_id <> l.experience_id) AS has_others
FROM rft.review w JOIN rft.label l ON l.label_id = w.reward_label_id
WHERE w.review_id = %(review_id)s;

-- name: answer_review
-- Answer one review, or withdraw its answer (NULL).
UPDATE rft.review SET answer = %(answer)s::text::rft.review_answer WHERE review_id = %(review_id)s;

-- name: review_progress (read)
-- How many reviews without a kind wait, and how many were answered, by this account and by all.
SELECT (SELECT count(*) FROM rft.review w JOIN rft.rollout_group g ON g.group_id = w.group_id
        WHERE w.kind IS NULL AND w.answer IS NULL AND w.deadline > rft.clock() AND g.status = 'sealed' AND g.left_by IS NULL
          AND (%(run_id)s::bigint IS NULL OR w.run_id = %(run_id)s)) AS waiting,
       count(*) FILTER (WHERE session_user_name = session_user) AS mine, count(*) AS answered
FROM rft.review WHERE kind IS NULL AND answer IS NOT NULL AND (%(run_id)s::bigint IS NULL OR run_id = %(run_id)s);

-- name: wrong_panel (read)
-- Why annotations of a kind cannot answer a review, and the kinds that there are.
SELECT rft.why_wrong_panel(%(kind)s, %(rule)s::text::rft.answer_rule, %(passing)s::text[]) AS problem,
       (SELECT string_agg(k.kind, ', ' ORDER BY k.kind) FROM rft.v_label_kind k) AS known;
