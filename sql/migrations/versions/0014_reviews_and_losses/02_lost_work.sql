-- A group or evaluation on which explorers die (a workflow that blocks its process, out of memory) must not take one after the other with it.

ALTER TABLE rft.worker ADD COLUMN crashed boolean NOT NULL DEFAULT false;
COMMENT ON COLUMN rft.worker.crashed IS 'Whether it ended of itself, perhaps because of what it held: a function of the user blocked it, or it died by a fault (as SIGSEGV) or for lack of memory. A process that was killed from outside, or of whose end nothing is known, has not crashed.';

ALTER TABLE rft.rollout_group ADD COLUMN num_lost smallint NOT NULL DEFAULT 0;
COMMENT ON COLUMN rft.rollout_group.num_lost IS 'How many explorers crashed while they held it, in the present attempt of the run. From the second on it is sampled alone; at the third it is sealed, with the rollouts that are missing recorded as failed.';

ALTER TABLE rft.evaluation ADD COLUMN num_lost smallint NOT NULL DEFAULT 0;
COMMENT ON COLUMN rft.evaluation.num_lost IS 'How many explorers crashed while they held it. At the third it counts as failed.';

COMMENT ON COLUMN rft.worklist.num_lost IS 'Pipeline only: how many workers crashed while they held it. From the first on it is claimed alone; after four it is set aside.';
