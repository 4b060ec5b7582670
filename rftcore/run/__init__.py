"""From a configuration to a run in the buffer: prepared, found again, joined by roles."""
