-- name: formula_names (read)
-- The names that a priority formula may use.
SELECT a.name FROM pg_proc p CROSS JOIN LATERAL unnest(p.proargnames, p.proargmodes) AS a (name, mode)
WHERE p.oid = 'rft.formula_columns'::regproc AND a.mode = 't';

-- name: check_formula
-- A formula as PostgreSQL prints it after parsing.
SELECT rft.checked_formula(%(formula)s) AS formula;

-- name: set_sampler
-- Set the sampling policy of a run; return whether it differs from the previous one.
SELECT rft.set_sampler(%(run_id)s, %(policy)s::jsonb) AS changed;

-- name: place_all
-- Give every group of a run its place in a new policy.
SELECT rft.place_all(%(run_id)s);

-- name: set_priorities
-- Set the priorities of groups; return how many of the groups are in the trainer's queue.
SELECT rft.set_priorities(%(run_id)s, %(item_ids)s, %(priorities)s) AS num_known;
