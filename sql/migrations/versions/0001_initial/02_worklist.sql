-- Work that waits for a consumer.

CREATE TYPE rft.item_kind AS ENUM ('group', 'pair', 'experience');
COMMENT ON TYPE rft.item_kind IS 'What one row of a worklist is.';

CREATE TYPE rft.consumer AS ENUM ('trainer', 'pipeline', 'selection');
COMMENT ON TYPE rft.consumer IS 'trainer: draws groups that were decided on; pipeline: decides on sealed groups; selection: a trainer that draws from a stored selection.';

-- Draws take rows from one end of an index. Their dead entries must be cleared before they are as many as the queue (autovacuum).
CREATE TABLE rft.worklist (
    run_id bigint NOT NULL,
    consumer rft.consumer NOT NULL,
    item_kind rft.item_kind NOT NULL DEFAULT 'group',
    item_id bigint NOT NULL,
    sort_key bigint NOT NULL,
    priority double precision NOT NULL DEFAULT 0,
    policy_step integer NOT NULL DEFAULT 0,
    available boolean NOT NULL DEFAULT true,
    lane text COLLATE "C" NOT NULL DEFAULT '',
    draw_key double precision NOT NULL DEFAULT 0,
    draw_weight double precision NOT NULL DEFAULT 1,
    times_sampled integer NOT NULL DEFAULT 0 CHECK (times_sampled >= 0),
    resume_step integer,
    claimed_by bigint,
    lease_until timestamptz,
    num_lost smallint NOT NULL DEFAULT 0,
    PRIMARY KEY (run_id, consumer, item_kind, item_id)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 2000);
CREATE INDEX worklist_age ON rft.worklist (run_id, consumer, policy_step) WHERE available;
CREATE INDEX worklist_claimed ON rft.worklist (claimed_by) WHERE claimed_by IS NOT NULL;
CREATE INDEX worklist_fresh ON rft.worklist (run_id, consumer, sort_key) WHERE available AND times_sampled = 0;
CREATE INDEX worklist_draw ON rft.worklist (run_id, consumer, lane, draw_key) WHERE available;
CREATE INDEX worklist_resting ON rft.worklist (run_id, consumer, resume_step) WHERE resume_step IS NOT NULL;
-- Groups that wait for people, by the time of their return, so that a queue of many thousands need not be read for them.
CREATE INDEX worklist_waiting ON rft.worklist (run_id, consumer, lease_until)
    WHERE NOT available AND claimed_by IS NULL AND lease_until IS NOT NULL;
COMMENT ON TABLE rft.worklist IS 'Items that wait for a consumer of a run: a queue for each run and consumer. Narrow and hot on purpose.';
COMMENT ON COLUMN rft.worklist.run_id IS 'The run whose trainer or pipeline takes the item.';
COMMENT ON COLUMN rft.worklist.consumer IS 'The consumer that takes the item. The columns below are of this consumer only where they name one.';
COMMENT ON COLUMN rft.worklist.item_kind IS 'Kind of the item, which determines the table of item_id.';
COMMENT ON COLUMN rft.worklist.item_id IS 'The item''s key in its own table.';
COMMENT ON COLUMN rft.worklist.sort_key IS 'First-in-first-out order: explore step, then ordinal.';
COMMENT ON COLUMN rft.worklist.priority IS 'Set by pipeline or trainer; the sampler''s formula may use it.';
COMMENT ON COLUMN rft.worklist.policy_step IS 'Trainer step of the policy that sampled the group''s oldest token, by which the claiming statement checks staleness. 2147483647: no policy sampled it, so it is never stale.';
COMMENT ON COLUMN rft.worklist.available IS 'Whether a consumer can take it now.';
COMMENT ON COLUMN rft.worklist.lane IS 'Trainer: its lane of rft.sampler_lane; empty: no lane accepts it. Stored selection: empty, or `left out` for an experience that is not drawn with its selected group.';
COMMENT ON COLUMN rft.worklist.draw_key IS 'Trainer and stored selection: the least is drawn first.';
COMMENT ON COLUMN rft.worklist.draw_weight IS 'Trainer only: the probability to be drawn next is this divided by the sum of its lane (prioritized); its priority (rank); else 1.';
COMMENT ON COLUMN rft.worklist.times_sampled IS 'Trainer and stored selection: number of draws in the current history, folded again when an attempt starts.';
COMMENT ON COLUMN rft.worklist.resume_step IS 'Trainer only: the step from which a group that was drawn can be drawn again; NULL: no cooldown.';
COMMENT ON COLUMN rft.worklist.claimed_by IS 'Pipeline only: the worker that holds it; NULL if none does.';
COMMENT ON COLUMN rft.worklist.lease_until IS 'Pipeline only: until when the claim is valid; of a group that waits for people, until when it waits. NULL if neither.';
COMMENT ON COLUMN rft.worklist.num_lost IS 'Pipeline only: how many workers crashed while they held it. After the first crash it is claimed alone; after four it is set aside.';

-- ANALYZE requires a right that workers do not have. It would only warn, and the planner would treat a queue of a million rows as empty.
CREATE FUNCTION rft.analyze_worklist() RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    ANALYZE rft.worklist;
END
$$;
COMMENT ON FUNCTION rft.analyze_worklist() IS 'Updates the planner''s statistics of the queues after one was filled in bulk.';
