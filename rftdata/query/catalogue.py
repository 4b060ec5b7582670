"""The tables and views that a query may name."""

from __future__ import annotations

from rftdata.postgres.database import Database


def tables(database: Database) -> dict[str, dict[str, str]]:
    """Return the tables and views of schema rft with the types of their columns; the type of an array is that of its elements and `[]`."""
    columns: dict[str, dict[str, str]] = {}
    for row in database.fetch("query_columns"):
        columns.setdefault(row["table_name"], {})[row["column_name"]] = row["data_type"]
    return columns
