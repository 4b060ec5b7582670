"""Whole runs: whether they learn, and their start, failures and growth."""
