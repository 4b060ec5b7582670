-- The whole public schema, one row per line of its reference, in the order to print them: columns of tables and views, and
-- values of enumerations, each with the comments that the database holds.
SELECT *
FROM (
    SELECT CASE WHEN c.relkind IN ('v', 'm') THEN 'view' ELSE 'table' END AS kind,
           c.relname::text AS relation,
           coalesce(obj_description(c.oid, 'pg_class'), '') AS relation_comment,
           a.attnum::float8 AS place,
           a.attname::text AS name,
           format_type(a.atttypid, a.atttypmod) AS type,
           a.attnotnull AS not_null,
           coalesce(CASE WHEN a.attidentity <> '' THEN 'identity' ELSE pg_get_expr(d.adbin, d.adrelid) END, '') AS default_value,
           coalesce(col_description(c.oid, a.attnum), '') AS comment
    FROM pg_class c
    JOIN pg_namespace n ON n.oid = c.relnamespace AND n.nspname = 'rft'
    JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
    LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
    WHERE c.relkind IN ('r', 'p', 'v', 'm') AND NOT c.relispartition
    UNION ALL
    SELECT 'enumeration', t.typname::text, coalesce(obj_description(t.oid, 'pg_type'), ''), e.enumsortorder::float8,
           e.enumlabel::text, '', true, '', ''
    FROM pg_type t
    JOIN pg_namespace n ON n.oid = t.typnamespace AND n.nspname = 'rft'
    JOIN pg_enum e ON e.enumtypid = t.oid
) AS line
ORDER BY array_position(ARRAY['table', 'view', 'enumeration'], kind), relation, place
