"""Stages and formulas in SQL, which DuckDB runs with access to the batch alone."""
