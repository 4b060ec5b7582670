"""Archived runs: the Parquet files with their texts, arrays and scores."""
