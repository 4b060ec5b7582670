-- name: make_formula_table
-- The names that a priority formula may use, as columns of an empty table.
CREATE TEMPORARY TABLE formula_check AS
SELECT * FROM rft.formula_columns(0, '{}', '{}', '{}');

-- name: formula_table_columns (read)
-- The columns of that table, and their generating expressions as the server prints them.
SELECT a.attname::text AS name, pg_get_expr(d.adbin, d.adrelid) AS expression
FROM pg_attribute a LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
WHERE a.attrelid = to_regclass('pg_temp.formula_check') AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum;

-- name: set_sampler
-- Set the sampling policy of a run; return whether it differs from the previous one.
SELECT rft.set_sampler(%(run_id)s, %(policy)s::jsonb) AS changed;

-- name: place_all
-- Give every group of a run its place in a new policy.
SELECT rft.place_all(%(run_id)s);

-- name: set_priorities
-- Set the priorities of groups; return how many of the groups are in the trainer's queue.
SELECT rft.set_priorities(%(run_id)s, %(item_ids)s, %(priorities)s) AS num_known;
