"""Queries over the tables, views and arrays of a buffer, by PostgreSQL, DuckDB and data loaders."""
