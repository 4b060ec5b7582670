-- Trainers compute with float32, in which a greater reward is infinite and ends a run. Rewards from before stay until they are corrected: a CHECK would
-- refuse every change of their rows, a purge too.
CREATE FUNCTION rft.refuse_untrainable_reward() RETURNS trigger
LANGUAGE plpgsql
AS $$
BEGIN
    RAISE EXCEPTION 'the reward of experience % is as great as 3.4e38', NEW.experience_id
        USING ERRCODE = 'check_violation', CONSTRAINT = 'experience_reward_trainable', SCHEMA = 'rft', TABLE = 'experience',
              DETAIL = format('Failing row contains (%s, %s).', NEW.experience_id, CASE WHEN abs(NEW.reward) >= 3.4e38 THEN NEW.reward ELSE NEW.reward_sampled END),
              HINT = 'Scale the rewards; nothing was stored.';
END
$$;
COMMENT ON FUNCTION rft.refuse_untrainable_reward() IS 'Trigger: refuses rewards that are infinite in float32.';
CREATE TRIGGER experience_reward_trainable AFTER INSERT OR UPDATE OF reward, reward_sampled ON rft.experience
    FOR EACH ROW WHEN (abs(NEW.reward) >= 3.4e38 OR abs(NEW.reward_sampled) >= 3.4e38) EXECUTE FUNCTION rft.refuse_untrainable_reward();
