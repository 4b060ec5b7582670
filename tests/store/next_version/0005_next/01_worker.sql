-- A column of a hot table, filled from the rows that are there, and one more value of an enumeration.

ALTER TYPE rft.worker_role ADD VALUE 'tester';
COMMENT ON TYPE rft.worker_role IS 'explorer: rollouts; pipeline: operator chain; trainer: weight updates; supervisor: rft run itself; replay: verdicts of another version, beside the run; tester: tests.';

ALTER TABLE rft.worker ADD COLUMN num_peers bigint NOT NULL DEFAULT 0;
COMMENT ON COLUMN rft.worker.num_peers IS 'Processes of its run when the column came, itself included.';
UPDATE rft.worker w SET num_peers = (SELECT count(*) FROM rft.worker p WHERE p.run_id = w.run_id);

DROP INDEX rft.worker_run;
CREATE INDEX worker_run ON rft.worker (run_id, role);
