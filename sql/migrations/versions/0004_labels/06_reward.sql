-- Trainers compute with float32, in which a greater reward is infinite and ends a run. Rows from before keep theirs until they are corrected.
ALTER TABLE rft.experience
    ADD CONSTRAINT experience_reward_trainable CHECK (abs(reward) < 3.4e38) NOT VALID,
    ADD CONSTRAINT experience_reward_sampled_trainable CHECK (abs(reward_sampled) < 3.4e38) NOT VALID;
