-- Devices that engine and trainer use alternately (`explorer.sleep`); called a turn before, a word of dialogues.

ALTER TABLE rft.device_turn RENAME TO shared_device;
ALTER TABLE rft.shared_device RENAME CONSTRAINT device_turn_pkey TO shared_device_pkey;
ALTER TABLE rft.shared_device RENAME CONSTRAINT device_turn_run_id_fkey TO shared_device_run_id_fkey;
COMMENT ON TABLE rft.shared_device IS 'A device that the processes of a run use alternately: the engine sleeps while the trainer trains.';
COMMENT ON COLUMN rft.shared_device.run_id IS 'The run whose processes share the device.';
COMMENT ON COLUMN rft.shared_device.machine IS 'The machine, by the start of its kernel, which its containers share. For the device cpu also the container, which has memory of its own.';
COMMENT ON COLUMN rft.shared_device.device IS 'The id of the GPU, or cpu.';
COMMENT ON COLUMN rft.shared_device.holder IS 'The worker that has the device. One that has stopped has lost it. NULL if none has taken it.';
COMMENT ON COLUMN rft.shared_device.wanted_by IS 'The worker that has asked for the device; NULL if none has.';
COMMENT ON COLUMN rft.shared_device.since IS 'When the holder took the device, or the last one gave it.';
