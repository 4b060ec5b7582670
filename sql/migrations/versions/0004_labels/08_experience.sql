-- A page of the experiences of one run, from an id on, reads no rows of other runs.
CREATE INDEX experience_run ON rft.experience (run_id, experience_id);
