-- A group on which workers die (out of memory, a crash in somebody's library) must not take one worker after the other with it.

ALTER TABLE rft.worklist ADD COLUMN num_lost smallint NOT NULL DEFAULT 0;
COMMENT ON COLUMN rft.worklist.num_lost IS 'Pipeline only: how many workers ended while they held it. From the first on it is claimed alone; after four it is set aside.';
