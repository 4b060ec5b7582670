-- How a run samples: its policy in lanes, and what it has drawn from each. See docs/decisions/0014.

CREATE TYPE rft.sample_order AS ENUM ('fifo', 'newest', 'uniform', 'prioritized', 'rank');
COMMENT ON TYPE rft.sample_order IS 'fifo: the oldest first; newest: the newest first; uniform: each with the same chance; prioritized: with a chance in proportion to its weight; rank: to a power of its rank by priority.';

CREATE TABLE rft.sampler (
    run_id bigint PRIMARY KEY,
    max_staleness integer NOT NULL,
    formula text,
    samples_per_insert double precision CHECK (samples_per_insert > 0),
    min_size_to_sample integer NOT NULL,
    error_buffer double precision NOT NULL,
    fresh_share double precision NOT NULL,
    epoch integer NOT NULL DEFAULT 0,
    num_inserted bigint NOT NULL DEFAULT 0
);
COMMENT ON TABLE rft.sampler IS 'How a run samples; written by each attempt when it starts.';
COMMENT ON COLUMN rft.sampler.run_id IS 'The run.';
COMMENT ON COLUMN rft.sampler.max_staleness IS 'Groups whose oldest token is older than this many trainer steps are not drawn.';
COMMENT ON COLUMN rft.sampler.formula IS 'An expression over the columns of rft.formula_columns, as PostgreSQL printed it after parsing; NULL: the priority itself.';
COMMENT ON COLUMN rft.sampler.samples_per_insert IS 'Groups drawn per group that became ready; NULL: no limit.';
COMMENT ON COLUMN rft.sampler.min_size_to_sample IS 'Groups that must have become ready before the first draw, where the ratio is limited.';
COMMENT ON COLUMN rft.sampler.error_buffer IS 'How many samples the ratio may be exceeded by.';
COMMENT ON COLUMN rft.sampler.fresh_share IS 'New groups that explorers supply per group of a batch.';
COMMENT ON COLUMN rft.sampler.epoch IS 'Grows when the policy changes: counts of another epoch do not go on.';
COMMENT ON COLUMN rft.sampler.num_inserted IS 'Groups that became ready in this epoch, without those in rft.sampler_insert; kept where the ratio is limited.';

CREATE TABLE rft.sampler_insert (
    run_id bigint NOT NULL,
    num_groups integer NOT NULL
);
CREATE INDEX sampler_insert_run ON rft.sampler_insert (run_id);
COMMENT ON TABLE rft.sampler_insert IS 'Groups that became ready since the last draw, a row per transaction so that writers do not wait for each other; the next draw adds them up.';
COMMENT ON COLUMN rft.sampler_insert.run_id IS 'The run.';
COMMENT ON COLUMN rft.sampler_insert.num_groups IS 'How many.';

CREATE TABLE rft.sampler_lane (
    run_id bigint NOT NULL,
    lane text NOT NULL CHECK (lane <> ''),
    place integer NOT NULL,
    source rft.experience_source,
    taskset text,
    replay boolean NOT NULL,
    ratio double precision NOT NULL CHECK (ratio > 0),
    sample_order rft.sample_order NOT NULL,
    max_times_sampled integer CHECK (max_times_sampled > 0),
    cooldown_steps integer NOT NULL CHECK (cooldown_steps > 0),
    priority_exponent double precision NOT NULL,
    importance_exponent double precision NOT NULL,
    PRIMARY KEY (run_id, lane)
);
COMMENT ON TABLE rft.sampler_lane IS 'One queue of a run''s sampler: which groups stand in it, in which order they are drawn, and its share of a batch.';
COMMENT ON COLUMN rft.sampler_lane.run_id IS 'The run.';
COMMENT ON COLUMN rft.sampler_lane.lane IS 'Its name.';
COMMENT ON COLUMN rft.sampler_lane.place IS 'A group stands in the first lane, in this order, that takes it and has uses left.';
COMMENT ON COLUMN rft.sampler_lane.source IS 'It takes groups of this source; NULL: of any.';
COMMENT ON COLUMN rft.sampler_lane.taskset IS 'It takes groups of this taskset; NULL: of any.';
COMMENT ON COLUMN rft.sampler_lane.replay IS 'It takes groups that were drawn before and that no other lane has uses left for.';
COMMENT ON COLUMN rft.sampler_lane.ratio IS 'Its share of a batch is this over the sum of all.';
COMMENT ON COLUMN rft.sampler_lane.sample_order IS 'Which of its groups are drawn first.';
COMMENT ON COLUMN rft.sampler_lane.max_times_sampled IS 'How often one group may be drawn in one history; NULL: no limit.';
COMMENT ON COLUMN rft.sampler_lane.cooldown_steps IS 'Trainer steps from one draw of a group to the next, at least.';
COMMENT ON COLUMN rft.sampler_lane.priority_exponent IS 'Weight = priority, or 1 / rank, to this power.';
COMMENT ON COLUMN rft.sampler_lane.importance_exponent IS 'Importance weight = (1 / probability) to this power, over the greatest of the batch.';

CREATE TABLE rft.sampler_step (
    attempt_id bigint NOT NULL,
    trainer_step integer NOT NULL,
    lane text NOT NULL,
    epoch integer NOT NULL,
    draw_number bigint NOT NULL,
    num_assigned bigint NOT NULL,
    num_drawn bigint NOT NULL,
    clock double precision NOT NULL,
    PRIMARY KEY (attempt_id, trainer_step, lane)
);
CREATE INDEX sampler_step_newest ON rft.sampler_step (attempt_id, draw_number);
COMMENT ON TABLE rft.sampler_step IS 'Where each lane stood after a step, append-only: going back to a checkpoint finds what it left there. Only policies that need it write here.';
COMMENT ON COLUMN rft.sampler_step.attempt_id IS 'The attempt.';
COMMENT ON COLUMN rft.sampler_step.trainer_step IS 'Its step.';
COMMENT ON COLUMN rft.sampler_step.lane IS 'The lane.';
COMMENT ON COLUMN rft.sampler_step.epoch IS 'The policy''s epoch.';
COMMENT ON COLUMN rft.sampler_step.draw_number IS 'Grows with every draw of a history.';
COMMENT ON COLUMN rft.sampler_step.num_assigned IS 'Places of batches that were the lane''s by its ratio, up to this step.';
COMMENT ON COLUMN rft.sampler_step.num_drawn IS 'Groups drawn from it, up to this step.';
COMMENT ON COLUMN rft.sampler_step.clock IS 'Greatest draw_key drawn from it: the time of its race (uniform and prioritized).';

ALTER TABLE rft.worklist
    ADD COLUMN lane text COLLATE "C" NOT NULL DEFAULT '',
    ADD COLUMN draw_key double precision NOT NULL DEFAULT 0,
    ADD COLUMN draw_weight double precision NOT NULL DEFAULT 1,
    ADD COLUMN times_sampled integer NOT NULL DEFAULT 0,
    ADD COLUMN resume_step integer;
DROP INDEX rft.worklist_available;
CREATE INDEX worklist_fresh ON rft.worklist (consumer, sort_key) WHERE available AND times_sampled = 0;
CREATE INDEX worklist_draw ON rft.worklist (consumer, lane, draw_key) WHERE available;
CREATE INDEX worklist_resting ON rft.worklist (consumer, resume_step) WHERE resume_step IS NOT NULL;
-- Draws take rows from one end of an index: what they leave there has to be cleared before it is as long as the queue.
ALTER TABLE rft.worklist SET (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 2000);
-- What runs of before have drawn.
UPDATE rft.worklist w SET times_sampled = 1
FROM rft.run r, rft.draw d, rft.attempt_history h
WHERE w.consumer = 'trainer/' || r.run_id AND d.item_kind = w.item_kind AND d.item_id = w.item_id AND h.history_id = r.current_attempt_id
  AND h.attempt_id = d.attempt_id AND (h.last_step IS NULL OR d.trainer_step <= h.last_step);
COMMENT ON COLUMN rft.worklist.priority IS 'How much it matters, as pipeline or trainer said; the sampler''s formula may use it.';
COMMENT ON COLUMN rft.worklist.lane IS 'Trainer only: the lane of rft.sampler_lane it stands in; empty: none takes it.';
COMMENT ON COLUMN rft.worklist.draw_key IS 'Trainer only: the least is drawn first.';
COMMENT ON COLUMN rft.worklist.draw_weight IS 'Trainer only: its chance of being drawn next is this over the sum of its lane (prioritized); its priority (rank); else 1.';
COMMENT ON COLUMN rft.worklist.times_sampled IS 'Trainer only: draws of the present history, folded again when an attempt starts.';
COMMENT ON COLUMN rft.worklist.resume_step IS 'Trainer only: the step from which a group that was drawn can be drawn again; NULL: it does not rest.';

ALTER TABLE rft.rollout_group ADD COLUMN is_adopted boolean NOT NULL DEFAULT false;
COMMENT ON COLUMN rft.rollout_group.is_adopted IS 'Nobody planned it: an import, or written by a person. It takes the place of a planned one where it stands in a lane that explorers supply.';

ALTER TABLE rft.draw
    ADD COLUMN importance_weight double precision,
    ADD COLUMN draw_key double precision;
COMMENT ON COLUMN rft.draw.importance_weight IS 'What its loss is multiplied by, to correct for the chance with which it was drawn; NULL: 1.';
COMMENT ON COLUMN rft.draw.draw_key IS 'The group''s worklist.draw_key when drawn, where it may be drawn again: going back restores it.';
