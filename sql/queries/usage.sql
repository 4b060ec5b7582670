-- name: open_usage
-- Create the row of a budget.
INSERT INTO rft.endpoint_usage (run_id, name) VALUES (%(run_id)s, %(name)s) ON CONFLICT DO NOTHING;

-- name: reserve_usage
-- Reserve usage within the limits, or not at all, so that concurrent workers cannot exceed them together. NULL: no limit.
UPDATE rft.endpoint_usage
SET num_calls = num_calls + %(calls)s, num_tokens = num_tokens + %(tokens)s, cost = cost + %(cost)s, updated_at = clock_timestamp()
WHERE run_id = %(run_id)s AND name = %(name)s
  AND (%(max_calls)s::bigint IS NULL OR num_calls + %(calls)s <= %(max_calls)s)
  AND (%(max_tokens)s::bigint IS NULL OR num_tokens + %(tokens)s <= %(max_tokens)s)
  AND (%(max_cost)s::double precision IS NULL OR cost + %(cost)s <= %(max_cost)s);

-- name: settle_usage
-- Add the difference between the reserved and the actual usage.
UPDATE rft.endpoint_usage
SET num_calls = num_calls + %(calls)s, num_tokens = num_tokens + %(tokens)s, cost = greatest(0, cost + %(cost)s),
    updated_at = clock_timestamp()
WHERE run_id = %(run_id)s AND name = %(name)s;

-- name: usage_of_run (read)
-- The usage that a run has recorded for a budget.
SELECT num_calls, num_tokens, cost FROM rft.endpoint_usage WHERE run_id = %(run_id)s AND name = %(name)s;
