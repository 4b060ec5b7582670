"""Stages and formulas in SQL, run by DuckDB without access to anything but the batch."""
