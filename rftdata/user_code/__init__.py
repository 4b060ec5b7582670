"""User functions: their time limits, and the end of processes that they block."""
