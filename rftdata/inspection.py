"""What a buffer holds and runs on: for checks and for programs that list its tables."""

from __future__ import annotations

from dataclasses import dataclass

from rftdata.postgres.database import Database, records
from rftdata.postgres.migrations import schema_version

__all__ = ["Counts", "counts", "has_experience", "schema_version", "server_version", "tables"]


@dataclass(frozen=True, kw_only=True)
class Counts:
    """How many segments, rows in them and experiences a buffer holds."""

    segments: int
    rows: int
    experiences: int


def counts(database: Database) -> Counts:
    """See `Counts`."""
    return records(Counts, database.fetch("doctor_counts"))[0]


def has_experience(database: Database, experience_id: int) -> bool:
    """Whether there is an experience of this id."""
    return bool(database.fetch("experience_exists", experience_id=experience_id))


def tables(database: Database) -> dict[str, dict[str, str]]:
    """Tables and views of schema rft with the types of their columns."""
    found: dict[str, dict[str, str]] = {}
    for row in database.fetch("query_columns"):
        found.setdefault(row["table_name"], {})[row["column_name"]] = row["data_type"]
    return found


def server_version(database: Database) -> str | None:
    """Version of PostgreSQL, as the server names it."""
    with database.connection() as connection:
        return connection.info.parameter_status("server_version")
