-- A process that decides on history again does no part of the run's own work.

ALTER TYPE rft.worker_role ADD VALUE 'replay';
COMMENT ON TYPE rft.worker_role IS 'explorer: rollouts; pipeline: operator chain; trainer: weight updates; supervisor: rft run itself; replay: verdicts of another version, beside the run.';
