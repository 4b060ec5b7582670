-- Tries of a rollout that failed for reasons outside of it.

ALTER TABLE rft.rollout ADD COLUMN try_errors text[];
COMMENT ON COLUMN rft.rollout.try_errors IS 'Why earlier tries of the rollout were given up, the first first: errors of the infrastructure, or the loss of an explorer whose answers could not all be taken over. NULL if it is the first try.';
