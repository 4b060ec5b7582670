-- Files of segments have a life: appended to, closed, retired, removed. See docs/decisions/0016.

ALTER TABLE rft.segment_file
    ADD COLUMN closed_at timestamptz,
    ADD COLUMN retired_at timestamptz,
    ADD COLUMN removed_at timestamptz,
    ADD CHECK (retired_at IS NULL OR closed_at IS NOT NULL),
    ADD CHECK (removed_at IS NULL OR retired_at IS NOT NULL);
COMMENT ON COLUMN rft.segment_file.closed_at IS 'Since when no segment may be committed to it: its writer is taken for dead. NULL: its writer appends.';
COMMENT ON COLUMN rft.segment_file.retired_at IS 'Since when no segment lives in it; it is removed after a grace. NULL while one does.';
COMMENT ON COLUMN rft.segment_file.removed_at IS 'When the file was removed. The row stays, so that nobody commits to the name again.';

CREATE INDEX segment_file_id ON rft.segment (file_id);

CREATE TABLE rft.buffer (
    buffer_id uuid PRIMARY KEY DEFAULT gen_random_uuid()
);
CREATE UNIQUE INDEX buffer_single ON rft.buffer ((true));
INSERT INTO rft.buffer DEFAULT VALUES;
COMMENT ON TABLE rft.buffer IS 'This buffer: one row.';
COMMENT ON COLUMN rft.buffer.buffer_id IS 'Names of its segment files begin with the first 12 digits: files of another buffer in the same folder are not taken for orphans.';
