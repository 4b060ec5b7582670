"""Checks of a run before a process is started: from its configuration to a list of findings."""
