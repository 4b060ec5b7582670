-- Every right of the roles and of PUBLIC in the schema: one row per object and role that has one besides reading a table.
WITH role (place, role) AS (VALUES (1, 'PUBLIC'), (2, 'rft_reader'), (3, 'rft_labeler'), (4, 'rft_worker')),
relation AS (
    SELECT c.oid, c.relname::text AS name, CASE c.relkind WHEN 'S' THEN 'sequence' WHEN 'v' THEN 'view' ELSE 'table' END AS kind
    FROM pg_class c WHERE c.relnamespace = 'rft'::regnamespace AND c.relkind IN ('r', 'p', 'v', 'm', 'S')),
of_table AS (
    SELECT r.kind, r.name, o.role, concat_ws(', ',
        (SELECT string_agg(w.wanted, ', ' ORDER BY w.nth)
         FROM unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE', 'TRUNCATE', 'REFERENCES', 'TRIGGER']) WITH ORDINALITY AS w (wanted, nth)
         WHERE has_table_privilege(lower(o.role), r.oid, w.wanted)),
        (SELECT string_agg(format('%s (%s)', p.wanted, p.columns), ', ' ORDER BY p.wanted) FROM (
            SELECT w.wanted, string_agg(a.attname, ', ' ORDER BY a.attnum) AS columns
            FROM unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'REFERENCES']) AS w (wanted)
            JOIN pg_attribute a ON a.attrelid = r.oid AND a.attnum > 0 AND NOT a.attisdropped
            WHERE NOT has_table_privilege(lower(o.role), r.oid, w.wanted) AND has_column_privilege(lower(o.role), r.oid, a.attnum, w.wanted)
            GROUP BY w.wanted) p)) AS rights
    FROM relation r CROSS JOIN role o WHERE r.kind <> 'sequence'),
of_sequence AS (
    SELECT r.kind, r.name, o.role,
        (SELECT string_agg(w.wanted, ', ' ORDER BY w.wanted) FROM unnest(ARRAY['SELECT', 'UPDATE', 'USAGE']) AS w (wanted)
         WHERE has_sequence_privilege(lower(o.role), r.oid, w.wanted)) AS rights
    FROM relation r CROSS JOIN role o WHERE r.kind = 'sequence'),
of_function AS (
    SELECT CASE WHEN p.prosecdef THEN 'function with the owner''s rights' ELSE 'function' END AS kind,
           substr(p.oid::regprocedure::text, 5) AS name, o.role, 'EXECUTE' AS rights
    FROM pg_proc p CROSS JOIN role o
    WHERE p.pronamespace = 'rft'::regnamespace AND has_function_privilege(lower(o.role), p.oid, 'EXECUTE'))
SELECT l.kind, l.name, l.role, l.rights
FROM (SELECT * FROM of_table UNION ALL SELECT * FROM of_sequence UNION ALL SELECT * FROM of_function) l JOIN role o USING (role)
WHERE coalesce(l.rights, '') <> ''
ORDER BY array_position(ARRAY['table', 'view', 'sequence', 'function with the owner''s rights', 'function'], l.kind), l.name COLLATE "C", o.place
