"""Writing groups: arrays and rows in one commit."""
