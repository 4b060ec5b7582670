-- name: create_and_grant_roles
-- Create the roles, then grant rights to them.
WITH made AS MATERIALIZED (SELECT rft.create_roles() AS roles)
SELECT made.roles AS made, (SELECT rft.grant_roles() WHERE made.roles IS NOT NULL) AS granted FROM made;
