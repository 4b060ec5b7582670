-- name: rft_search_path
-- Names without a schema are those of rft, as in `rft sql`.
SET LOCAL search_path TO rft, public;

-- name: is_plain_account (read)
-- Whether an account can do nothing but read the buffer and label: no attribute, and no other role.
SELECT NOT (r.rolsuper OR r.rolcreaterole OR r.rolcreatedb OR r.rolreplication OR r.rolbypassrls) AND NOT EXISTS (
    SELECT FROM pg_roles m WHERE pg_has_role(r.oid, m.oid, 'MEMBER') AND m.oid <> r.oid AND m.rolname NOT IN ('rft_reader', 'rft_labeler')) AS is_plain
FROM pg_roles r WHERE r.rolname = session_user;

-- name: expired_reader_logins (read)
-- Logins of studios that ended without dropping them.
SELECT rolname::text AS name FROM pg_roles WHERE starts_with(rolname, 'rft_studio_reader_') AND rolvaliduntil < rft.clock();

-- name: studio_saved_queries (read)
-- The saved queries of a kind, by name.
SELECT saved_query_id, name, query, author, session_user_name, made_at FROM rft.saved_query
WHERE kind = %(kind)s::rft.saved_query_kind AND removed_at IS NULL ORDER BY lower(name), saved_query_id LIMIT 200;

-- name: studio_save_query
-- Keep a query under a name that is free.
INSERT INTO rft.saved_query (kind, name, query, author) VALUES (%(kind)s::rft.saved_query_kind, %(name)s, %(query)s, %(author)s)
ON CONFLICT (kind, name) WHERE removed_at IS NULL DO NOTHING;

-- name: studio_remove_query
-- Remove a saved query.
UPDATE rft.saved_query SET removed_at = clock_timestamp() WHERE saved_query_id = %(saved_query_id)s AND removed_at IS NULL;

-- name: studio_found (read)
-- What a table of experiences shows of each.
SELECT e.experience_id, e.group_id, r.run_id, r.name AS run, t.taskset, t.task_key, e.reward, e.reward_sampled, e.num_response_tokens, e.finish_reason,
       e.source::text AS source, left(e.response, 400) AS response, rft.state(g.status, u.times_sampled, v.kept, g.trainable) AS state, v.stage
FROM unnest(%(experience_ids)s::bigint[]) WITH ORDINALITY AS i (experience_id, place)
JOIN rft.experience e USING (experience_id)
JOIN rft.run r USING (run_id)
JOIN rft.rollout_group g USING (group_id)
LEFT JOIN rft.task t ON t.task_id = g.task_id
LEFT JOIN rft.verdict v ON v.experience_id = e.experience_id AND v.newest_of = g.decided_by
LEFT JOIN rft.draw u ON u.newest_of = e.experience_id
ORDER BY i.place;
