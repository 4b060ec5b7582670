-- One more activity.

COMMENT ON COLUMN rft.worker_span.activity IS 'starting, waiting, asleep (its device is another process''s), sampling, evaluating, transferring (loading weights into an engine), checking, deciding, replaying, drawing (rows of a batch), compiling (what a step computes), training, publishing, checkpointing, recording (a step), watching or working.';
