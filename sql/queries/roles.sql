-- name: create_and_grant_roles
-- In this order: the roles that the first makes are given their rights by the second.
WITH made AS MATERIALIZED (SELECT rft.create_roles() AS roles)
SELECT made.roles AS made, (SELECT rft.grant_roles() WHERE made.roles IS NOT NULL) AS granted FROM made;
