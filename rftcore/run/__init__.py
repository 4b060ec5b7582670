"""Runs in the buffer: prepared from a configuration, found again, joined by roles."""
