"""Writing of groups: arrays to a segment, rows by COPY, one commit."""
