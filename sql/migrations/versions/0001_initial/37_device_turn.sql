-- Engine and trainer that take turns on a device they share (`explorer.sleep`).

CREATE TABLE rft.device_turn (
    run_id bigint NOT NULL REFERENCES rft.run,
    machine text NOT NULL,
    device text NOT NULL,
    holder bigint,
    wanted_by bigint,
    since timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (run_id, machine, device)
);
COMMENT ON TABLE rft.device_turn IS 'A device on which the processes of a run take turns: the engine sleeps while the trainer trains.';
COMMENT ON COLUMN rft.device_turn.run_id IS 'The run whose processes share the device.';
COMMENT ON COLUMN rft.device_turn.machine IS 'The machine, by the start of its kernel, which its containers share. For the device cpu also the container, which has memory of its own.';
COMMENT ON COLUMN rft.device_turn.device IS 'The id of the GPU, or cpu.';
COMMENT ON COLUMN rft.device_turn.holder IS 'The worker whose turn it is. One that has stopped has no turn. NULL if none has taken it.';
COMMENT ON COLUMN rft.device_turn.wanted_by IS 'The worker that has asked for the next turn; NULL if none has.';
COMMENT ON COLUMN rft.device_turn.since IS 'When the turn began or ended.';
