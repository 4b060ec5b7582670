"""Writing of groups: arrays and rows in one commit."""
