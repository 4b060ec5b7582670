-- name: ask_people
-- Ask people about targets, in the given order; one that was asked about before gets the new number of answers, priority and deadline.
INSERT INTO rft.question AS q (kind, target_id, wanted, priority, deadline, author)
SELECT %(kind)s, n.target_id, %(wanted)s, n.priority, coalesce(%(deadline)s::timestamptz, 'infinity'), %(author)s
FROM unnest(%(target_ids)s::bigint[], %(priorities)s::float8[]) WITH ORDINALITY AS n (target_id, priority, place) ORDER BY n.place
ON CONFLICT (target_id, kind) WHERE review_id IS NULL
DO UPDATE SET wanted = excluded.wanted, priority = excluded.priority, deadline = excluded.deadline, is_open = q.num_answers < excluded.wanted;

-- name: claim_questions
-- Lease the next questions of a queue, and renew those that are held.
SELECT question_id, review_id, target_id, leased_until FROM rft.claim_questions(%(queue)s, %(num)s, %(run_id)s, %(holding)s::bigint[]);

-- name: renew_questions
-- Renew leases; those that are still held.
SELECT question_id FROM rft.renew_questions(%(question_ids)s::bigint[]) AS q (question_id);

-- name: release_questions
-- End leases.
SELECT rft.release_questions(%(question_ids)s::bigint[]) AS n;

-- name: skip_question
-- Move a question to the end of the account's queue, or back.
SELECT CASE WHEN %(is_skipped)s THEN rft.skip_question(%(question_id)s) ELSE rft.unskip_question(%(question_id)s) END AS is_done;

-- name: skipped_questions (read)
-- What this account has skipped in a queue, the newest first.
SELECT question_id, target_id FROM rft.skipped_questions(%(queue)s, %(run_id)s);

-- name: answers_of_people (read)
-- What people answered, to compare: of a blind kind each account's first answer, since a later one was given after looking at those of others, and none
-- after a review of the kind was decided, since all may see its answer; of others what stands.
-- Everything is joined once: look-ups for each annotation would cost as much as all the rest.
WITH said AS (
    SELECT a.*, NOT EXISTS (SELECT FROM rft.annotation s WHERE s.supersedes = a.annotation_id) AS is_last
    FROM rft.annotation a
    WHERE a.source IN ('human', 'import') AND (%(kind)s::text IS NULL OR a.kind = %(kind)s)),
in_order AS (
    SELECT a.*, min(a.annotation_id) OVER chain = a.annotation_id AS is_first, bool_or(a.is_last AND NOT a.retracted) OVER chain AS stands
    FROM said a WINDOW chain AS (PARTITION BY a.kind, a.target_id, a.source, a.session_user_name))
SELECT a.annotation_id, a.kind, k.type::text AS type, k.level::text AS level, k.spec, a.target_id, a.author, a.session_user_name AS account, a.value, a.seconds,
       a.shown, o.value AS gold
FROM in_order a
JOIN rft.label_kind k ON k.kind = a.kind AND k.version = a.kind_version
LEFT JOIN rft.rollout_group g ON g.group_id = a.group_id
LEFT JOIN (SELECT experience_id, kind, max(answered_at) AS decided_at FROM rft.review WHERE kind IS NOT NULL AND answer IS NOT NULL GROUP BY 1, 2) d
    ON d.experience_id = a.target_id AND d.kind = a.kind
LEFT JOIN rft.known_answers() o ON o.kind = a.kind AND o.target_id = a.target_id
WHERE NOT a.retracted AND (%(run_id)s::bigint IS NULL OR g.run_id = %(run_id)s)
  AND CASE WHEN a.source = 'human' AND a.kind = ANY ((SELECT rft.blind_kinds())::text[]) THEN a.is_first AND a.stands AND coalesce(a.made_at <= d.decided_at, true)
      ELSE a.is_last END
ORDER BY a.annotation_id;

-- name: disagreements (read)
-- Targets about which people's annotations differ and that are not decided on, those with the most people first.
SELECT a.target_id, min(a.group_id) AS group_id, count(*) AS num_people,
       jsonb_agg(jsonb_build_object('author', a.author, 'account', a.session_user_name, 'value', a.value, 'reason', a.reason) ORDER BY a.annotation_id) AS answers
FROM rft.v_annotation a
WHERE a.kind = %(kind)s AND a.source IN ('human', 'import') AND (%(run_id)s::bigint IS NULL OR a.run_id = %(run_id)s)
  AND NOT EXISTS (SELECT FROM rft.annotation d WHERE d.target_id = a.target_id AND d.kind = a.kind AND d.source = 'adjudication' AND NOT d.retracted
                  AND NOT EXISTS (SELECT FROM rft.annotation s WHERE s.supersedes = d.annotation_id))
GROUP BY a.target_id HAVING count(DISTINCT a.value) > 1 ORDER BY count(*) DESC, a.target_id LIMIT %(limit)s;

-- name: adjudicate
-- Decide on a target.
SELECT rft.adjudicate(%(kind)s, %(target_id)s, %(value)s, %(words)s) AS annotation_id;

-- name: add_gold
-- Store known answers.
INSERT INTO rft.gold (kind, target_id, value, author)
SELECT n.kind, n.target_id, n.value, %(author)s FROM unnest(%(kinds)s::text[], %(target_ids)s::bigint[], %(json_values)s::jsonb[]) AS n (kind, target_id, value);

-- name: set_gold_rate
-- How often the queue of a kind hands out targets with a known answer.
INSERT INTO rft.gold_rate (kind, rate) VALUES (%(kind)s, %(rate)s) ON CONFLICT (kind) DO UPDATE SET rate = excluded.rate;

-- name: permit_labels
-- Permit an account to label.
INSERT INTO rft.label_permission (account, kind, run_id, taskset, author) VALUES (%(account)s, %(kind)s, %(run_id)s, %(taskset)s, %(author)s);

-- name: doubts (read)
-- Of targets, how little confidence the newest judge has, and the share of annotations that differ from the most frequent one.
SELECT t.target_id, 1 - coalesce(j.confidence, 0.5) AS uncertainty, coalesce(d.differing, 0) AS disagreement
FROM unnest(%(target_ids)s::bigint[]) AS t (target_id)
LEFT JOIN LATERAL (
    SELECT a.confidence FROM rft.v_annotation a WHERE a.target_id = t.target_id AND a.kind = %(kind)s AND a.source = 'judge'
    ORDER BY a.annotation_id DESC LIMIT 1) j ON true
LEFT JOIN LATERAL (
    SELECT 1 - max(c.n)::double precision / sum(c.n)::double precision AS differing
    FROM (SELECT count(*) AS n FROM rft.v_annotation a WHERE a.target_id = t.target_id AND a.kind = %(kind)s AND a.source <> 'adjudication' GROUP BY a.value) c) d ON true;

-- name: may_judge (read)
-- Whether this account may decide where people disagree.
SELECT rft.may_judge() AS may_judge;

-- name: has_questions (read)
-- Whether people were asked to label with a kind: then its targets are claimed.
SELECT rft.has_questions(%(kind)s) AS has_questions;

-- name: add_comment
-- Store a comment; no row for a repeated request.
INSERT INTO rft.comment (target, target_id, kind, comment, author, key)
VALUES (%(target)s::text::rft.label_target, %(target_id)s, %(kind)s, %(comment)s, %(author)s, %(key)s) RETURNING comment_id;

-- name: comment_of_key (read)
-- The comment that this account stored under a key.
SELECT comment_id FROM rft.comment WHERE session_user_name = session_user AND key = %(key)s;

-- name: comments (read)
-- The newest comments on a target, the oldest of them first.
SELECT * FROM (
    SELECT comment_id, target::text AS target, target_id, kind, comment, author, session_user_name, made_at
    FROM rft.comment WHERE target_id = %(target_id)s AND target = %(target)s::text::rft.label_target
    ORDER BY comment_id DESC LIMIT %(limit)s) c
ORDER BY comment_id;

-- name: num_comments (read)
-- How many comments on targets this account sees.
SELECT target_id, count(*) AS num FROM rft.comment
WHERE target_id = ANY (%(target_ids)s) AND target = %(target)s::text::rft.label_target GROUP BY target_id;
