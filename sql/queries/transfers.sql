-- name: set_weight_receiver
-- Record whether an explorer takes weights now, and which version it needs as a file.
INSERT INTO rft.weight_receiver (worker_id, run_id, device, ready, wanted_version)
VALUES (%(worker_id)s, %(run_id)s, %(device)s, %(ready)s, %(wanted_version)s)
ON CONFLICT (worker_id) DO UPDATE SET ready = excluded.ready, wanted_version = excluded.wanted_version;

-- name: ready_receivers (read)
-- Live explorers of a run that take weights now, with the devices of their engines.
SELECT r.worker_id, r.device FROM rft.weight_receiver r JOIN rft.worker w USING (worker_id)
WHERE r.run_id = %(run_id)s AND r.ready AND w.stopped_at IS NULL AND w.heartbeat_at > rft.clock() - interval '15 s'
ORDER BY r.worker_id;

-- name: busy_receivers (read)
-- Number of live explorers of a run that take weights, but not now.
SELECT count(*) AS num FROM rft.weight_receiver r JOIN rft.worker w USING (worker_id)
WHERE r.run_id = %(run_id)s AND NOT r.ready AND w.stopped_at IS NULL AND w.heartbeat_at > rft.clock() - interval '15 s';

-- name: late_receivers (read)
-- Live explorers of a run that have missed a version and take weights now.
SELECT r.worker_id FROM rft.weight_receiver r JOIN rft.worker w USING (worker_id)
WHERE r.run_id = %(run_id)s AND r.wanted_version = %(policy_version_id)s AND r.ready
    AND w.stopped_at IS NULL AND w.heartbeat_at > rft.clock() - interval '15 s';

-- name: is_file_wanted (read)
-- Whether a live explorer has missed a version and needs its file.
SELECT EXISTS (
    SELECT FROM rft.weight_receiver r JOIN rft.worker w USING (worker_id)
    WHERE r.run_id = %(run_id)s AND r.wanted_version = %(policy_version_id)s AND w.stopped_at IS NULL) AS wanted;

-- name: insert_transfer
-- Offer a version to the engines; return the transfer's id.
INSERT INTO rft.weight_transfer (run_id, attempt_id, policy_version_id, fingerprint, tensors, adapters)
VALUES (%(run_id)s, %(attempt_id)s, %(policy_version_id)s, %(fingerprint)s, %(tensors)s, %(adapters)s)
RETURNING transfer_id;

-- name: newest_transfer (read)
-- The last offer of a version, with what a member needs to know to take part.
SELECT transfer_id, attempt_id, policy_version_id, status::text AS status, group_id, backend, address, num_ranks, dtype, in_float32,
       bucket_bytes, fingerprint
FROM rft.weight_transfer WHERE run_id = %(run_id)s AND policy_version_id = %(policy_version_id)s ORDER BY transfer_id DESC LIMIT 1;

-- name: transfer_tensors (read)
-- The tensor list of an attempt's transfers, and peft's configuration if they are adapters.
SELECT tensors, adapters FROM rft.weight_transfer WHERE attempt_id = %(attempt_id)s AND tensors IS NOT NULL ORDER BY transfer_id LIMIT 1;

-- name: acknowledge_transfer
-- Record that an explorer awaits a transfer, unless the offer is closed.
INSERT INTO rft.weight_receipt (transfer_id, worker_id, host, device, dtype, in_float32, num_ranks, group_id, kv_cache)
SELECT t.transfer_id, %(worker_id)s, %(host)s, %(device)s, %(dtype)s, %(in_float32)s::text[], %(num_ranks)s, %(group_id)s, %(kv_cache)s::rft.kv_cache
FROM rft.weight_transfer t WHERE t.transfer_id = %(transfer_id)s AND t.status = 'offered' FOR SHARE
ON CONFLICT DO NOTHING;

-- name: transfer_receipts (read)
-- The answers to an offer, in the order of the explorers. alive: whether the explorer's process is.
SELECT p.worker_id, p.status::text AS status, p.host, w.pid_space, p.device, p.dtype, p.in_float32, p.num_ranks, p.group_id, p.first_rank, p.error,
       w.stopped_at IS NULL AND w.heartbeat_at > rft.clock() - interval '15 s' AS alive
FROM rft.weight_receipt p JOIN rft.worker w USING (worker_id) WHERE p.transfer_id = %(transfer_id)s ORDER BY p.worker_id;

-- name: close_transfer
-- Let no explorer acknowledge from here on.
UPDATE rft.weight_transfer SET status = 'sending' WHERE transfer_id = %(transfer_id)s;

-- name: begin_transfer
-- Fix the group of a transfer.
UPDATE rft.weight_transfer
SET group_id = %(group_id)s, backend = %(backend)s, address = %(address)s, num_ranks = %(num_ranks)s, dtype = %(dtype)s,
    in_float32 = %(in_float32)s::text[], bucket_bytes = %(bucket_bytes)s, sent_at = clock_timestamp()
WHERE transfer_id = %(transfer_id)s;

-- name: set_transfer_rank
-- Make an explorer a member of the group.
UPDATE rft.weight_receipt SET first_rank = %(first_rank)s WHERE (transfer_id, worker_id) = (%(transfer_id)s, %(worker_id)s);

-- name: leave_out_of_transfer
-- Exclude an explorer that has acknowledged.
UPDATE rft.weight_receipt SET status = 'failed', error = %(error)s, ended_at = clock_timestamp()
WHERE (transfer_id, worker_id) = (%(transfer_id)s, %(worker_id)s);

-- name: end_transfer
-- Record how a transfer ended.
UPDATE rft.weight_transfer
SET status = 'ended', num_bytes = %(num_bytes)s, send_seconds = %(send_seconds)s, error = %(error)s, ended_at = clock_timestamp()
WHERE transfer_id = %(transfer_id)s;

-- name: end_receipt
-- Record how a transfer ended for an explorer.
UPDATE rft.weight_receipt
SET status = %(status)s::rft.receipt_status, pause_seconds = %(pause_seconds)s, error = %(error)s, ended_at = clock_timestamp()
WHERE (transfer_id, worker_id) = (%(transfer_id)s, %(worker_id)s);

-- name: locate_policy_version
-- Record where engines find a version that has been published already.
UPDATE rft.policy_version SET uri = %(uri)s, num_bytes = %(num_bytes)s, checksum = %(checksum)s
WHERE policy_version_id = %(policy_version_id)s;
