-- A session plans a function's statements once, often while the tables are nearly empty. Such plans read a whole queue for every
-- batch, or for every group of a batch, until the next ANALYZE: with 6,720 groups rft.place_all took 98 s. What finds its rows by their
-- keys may do so only.
ALTER FUNCTION rft.formula_values(bigint, bigint[], double precision[], integer[])
    SET enable_seqscan = off SET enable_material = off SET enable_hashjoin = off SET enable_mergejoin = off;
ALTER FUNCTION rft.ready_groups(bigint[], double precision[])
    SET enable_seqscan = off SET enable_material = off SET enable_hashjoin = off SET enable_mergejoin = off;
ALTER FUNCTION rft.place_all(bigint)
    SET enable_seqscan = off SET enable_material = off SET enable_hashjoin = off SET enable_mergejoin = off;
ALTER FUNCTION rft.set_priorities(bigint, bigint[], double precision[])
    SET enable_seqscan = off SET enable_material = off SET enable_hashjoin = off SET enable_mergejoin = off;
ALTER FUNCTION rft.wake_items(bigint, integer)
    SET enable_seqscan = off SET enable_material = off SET enable_hashjoin = off SET enable_mergejoin = off;
ALTER FUNCTION rft.age_out(bigint, integer, integer)
    SET enable_seqscan = off SET enable_material = off SET enable_hashjoin = off SET enable_mergejoin = off;
ALTER FUNCTION rft.draw_groups(bigint, bigint, integer, integer, integer)
    SET enable_seqscan = off SET enable_material = off SET enable_hashjoin = off SET enable_mergejoin = off;
ALTER FUNCTION rft.reopen_groups(bigint[])
    SET enable_seqscan = off SET enable_material = off SET enable_hashjoin = off SET enable_mergejoin = off;

-- Folds every draw of a history: whole tables, joined by hashing wherever that is possible.
ALTER FUNCTION rft.return_draws(bigint, bigint) SET enable_nestloop = off SET enable_mergejoin = off;
