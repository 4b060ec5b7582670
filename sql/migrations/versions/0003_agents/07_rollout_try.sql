-- Tries of a rollout that failed for reasons outside of it.

ALTER TABLE rft.rollout ADD COLUMN try_errors text[];
COMMENT ON COLUMN rft.rollout.try_errors IS 'Errors of the infrastructure, for which earlier tries of the rollout were given up, the first first; NULL if it is the first try.';
