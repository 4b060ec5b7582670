-- name: create_and_grant_roles
-- Create the roles, then grant rights to them.
WITH made AS MATERIALIZED (SELECT rft.create_roles() AS roles)
SELECT made.roles AS made, (SELECT rft.grant_roles() WHERE made.roles IS NOT NULL) AS granted FROM made;

-- name: open_to_everybody (read)
-- Functions and relations of the schema on which PUBLIC has a right. It has none once rft.grant_roles() has run.
SELECT 'function ' || p.oid::regprocedure AS name FROM pg_proc p
WHERE p.pronamespace = 'rft'::regnamespace AND has_function_privilege('public', p.oid, 'EXECUTE')
UNION ALL
SELECT 'relation rft.' || c.relname FROM pg_class c
WHERE c.relnamespace = 'rft'::regnamespace AND EXISTS (SELECT FROM aclexplode(c.relacl) a WHERE a.grantee = 0)
ORDER BY 1;
