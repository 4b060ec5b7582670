-- Devices that engine and trainer use alternately (`explorer.sleep`).

CREATE TABLE rft.shared_device (
    run_id bigint NOT NULL REFERENCES rft.run,
    machine text NOT NULL,
    device text NOT NULL,
    holder bigint,
    wanted_by bigint,
    since timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (run_id, machine, device)
);
COMMENT ON TABLE rft.shared_device IS 'A device that the processes of a run use alternately: the engine sleeps while the trainer trains.';
COMMENT ON COLUMN rft.shared_device.run_id IS 'The run whose processes share the device.';
COMMENT ON COLUMN rft.shared_device.machine IS 'The machine, by the start of its kernel, which its containers share. For the device cpu also the container, which has memory of its own.';
COMMENT ON COLUMN rft.shared_device.device IS 'The id of the GPU, or cpu.';
COMMENT ON COLUMN rft.shared_device.holder IS 'The worker that has the device. One that has stopped has lost it. NULL if none has taken it.';
COMMENT ON COLUMN rft.shared_device.wanted_by IS 'The worker that has asked for the device; NULL if none has.';
COMMENT ON COLUMN rft.shared_device.since IS 'When the holder took the device, or the last one gave it.';
