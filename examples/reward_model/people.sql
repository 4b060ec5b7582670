-- What people would do by hand: read two answers to one question, and say which is the better one. Here the answer with more digits in
-- the right place is preferred, and every tenth comparison is a mistake. Pairs of people need no reward.
WITH answer AS (
    SELECT v.experience_id, v.group_id, v.response,
           (SELECT count(*) FROM generate_series(1, length(v.answer)) i WHERE substr(v.response, i, 1) = substr(v.answer, i, 1))
               - abs(length(v.response) - length(v.answer)) AS quality
    FROM rft.v_experience v WHERE v.run = 'sort-collect' AND v.finish_reason = 'stop'
), compared AS (
    SELECT DISTINCT ON (b.group_id, b.response, w.response) b.experience_id AS better, w.experience_id AS worse,
           hashtext(b.experience_id || '-' || w.experience_id) % 10 = 0 AS mistaken
    FROM answer b JOIN answer w USING (group_id)
    WHERE b.quality > w.quality
    ORDER BY b.group_id, b.response, w.response, b.experience_id, w.experience_id
)
INSERT INTO rft.preference_pair (chosen_id, rejected_id, author)
SELECT CASE WHEN mistaken THEN worse ELSE better END, CASE WHEN mistaken THEN better ELSE worse END, 'people' FROM compared
ON CONFLICT DO NOTHING;
