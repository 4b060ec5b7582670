-- name: insert_worker
INSERT INTO rft.worker (run_id, role, host, pid) VALUES (%(run_id)s, %(role)s, %(host)s, %(pid)s) RETURNING worker_id;

-- name: heartbeat
UPDATE rft.worker SET heartbeat_at = rft.clock(), state = %(state)s, waiting_for = %(waiting_for)s, progress = %(progress)s
WHERE worker_id = %(worker_id)s;

-- name: renew_claims
-- A live worker keeps what it claimed. With its run in every condition: indexes lead to what a run has open.
-- Rows that somebody is just finishing are passed over: locked in another order they could end in a deadlock.
WITH groups AS (
    UPDATE rft.rollout_group SET lease_until = rft.clock() + %(lease_s)s * interval '1 s'
    WHERE group_id IN (
        SELECT group_id FROM rft.rollout_group WHERE run_id = %(run_id)s AND claimed_by = %(worker_id)s AND status = 'claimed'
        FOR UPDATE SKIP LOCKED)),
evaluations AS (
    UPDATE rft.evaluation SET lease_until = rft.clock() + %(lease_s)s * interval '1 s'
    WHERE run_id = %(run_id)s AND claimed_by = %(worker_id)s AND status = 'claimed')
UPDATE rft.worklist w SET lease_until = rft.clock() + %(lease_s)s * interval '1 s'
FROM (
    SELECT consumer, item_kind, item_id FROM rft.worklist
    WHERE consumer = 'pipeline/' || %(run_id)s AND claimed_by = %(worker_id)s AND NOT available
    FOR UPDATE SKIP LOCKED) mine
WHERE (w.consumer, w.item_kind, w.item_id) = (mine.consumer, mine.item_kind, mine.item_id);

-- name: stop_worker
UPDATE rft.worker SET stopped_at = clock_timestamp(), state = 'stopped', waiting_for = NULL, error = %(error)s
WHERE worker_id = %(worker_id)s AND stopped_at IS NULL;

-- name: live_workers
SELECT worker_id, role::text AS role, host, pid, heartbeat_at > rft.clock() - interval '15 s' AS beats
FROM rft.worker WHERE run_id = %(run_id)s AND stopped_at IS NULL;

-- name: release_lost_claims
-- Work of workers that left or fell silent goes back; a higher claim token fences whoever held it.
WITH groups AS (
    UPDATE rft.rollout_group g SET status = 'planned', claimed_by = NULL, lease_until = NULL, claim_token = claim_token + 1
    WHERE g.group_id IN (
        SELECT l.group_id FROM rft.rollout_group l JOIN rft.worker w ON w.worker_id = l.claimed_by
        WHERE l.run_id = %(run_id)s AND l.status = 'claimed' AND (w.stopped_at IS NOT NULL OR l.lease_until < rft.clock())
        FOR UPDATE OF l SKIP LOCKED)
    RETURNING 1),
evaluations AS (
    UPDATE rft.evaluation e SET status = 'planned', claimed_by = NULL, lease_until = NULL
    FROM rft.worker w
    WHERE e.run_id = %(run_id)s AND e.status = 'claimed' AND w.worker_id = e.claimed_by
      AND (w.stopped_at IS NOT NULL OR e.lease_until < rft.clock())
    RETURNING 1),
items AS (
    UPDATE rft.worklist l SET available = true, claimed_by = NULL, lease_until = NULL, num_lost = l.num_lost + 1
    FROM (
        SELECT i.consumer, i.item_kind, i.item_id FROM rft.worklist i JOIN rft.worker w ON w.worker_id = i.claimed_by
        WHERE i.consumer = 'pipeline/' || %(run_id)s AND NOT i.available AND (w.stopped_at IS NOT NULL OR i.lease_until < rft.clock())
        FOR UPDATE OF i SKIP LOCKED) lost
    WHERE (l.consumer, l.item_kind, l.item_id) = (lost.consumer, lost.item_kind, lost.item_id)
    RETURNING 1)
SELECT (SELECT count(*) FROM groups) + (SELECT count(*) FROM evaluations) + (SELECT count(*) FROM items) AS released;
