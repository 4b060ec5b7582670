"""Queries by DuckDB over the tables, views and arrays of a buffer, reading only what each query needs."""
