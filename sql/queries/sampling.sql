-- name: make_formula_table
CREATE TEMPORARY TABLE formula_check AS  -- what a priority formula may name, as columns of an empty table
SELECT * FROM rft.formula_columns(0, '{}', '{}', '{}');

-- name: formula_table_columns
SELECT a.attname::text AS name, pg_get_expr(d.adbin, d.adrelid) AS expression
FROM pg_attribute a LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
WHERE a.attrelid = to_regclass('pg_temp.formula_check') AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum;

-- name: set_sampler
SELECT rft.set_sampler(%(run_id)s, %(policy)s::jsonb) AS changed;

-- name: place_all
SELECT rft.place_all(%(run_id)s);

-- name: set_priorities
SELECT rft.set_priorities(%(run_id)s, %(item_ids)s, %(priorities)s) AS num_known;
