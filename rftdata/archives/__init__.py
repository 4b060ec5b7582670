"""Archived runs: Parquet files with what their rows and segments have lost, and the refusal of what needs it."""
