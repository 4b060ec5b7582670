"""Facts about a buffer and its database, for checks and for programs that list its tables."""

from __future__ import annotations

from dataclasses import dataclass

from rftdata.postgres.database import Database, records
from rftdata.postgres.migrations import schema_version
from rftdata.query.catalogue import tables

__all__ = ["Counts", "counts", "has_experience", "schema_version", "server_version", "tables"]


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Numbers of segments, of rows in them, and of experiences."""

    segments: int
    rows: int
    experiences: int


def counts(database: Database) -> Counts:
    """Count the segments, rows and experiences of a buffer."""
    return records(Counts, database.fetch("doctor_counts"))[0]


def has_experience(database: Database, experience_id: int) -> bool:
    """Return whether an experience exists."""
    return bool(database.fetch("experience_exists", experience_id=experience_id))


def server_version(database: Database) -> str | None:
    """Return the version of PostgreSQL as reported by the server."""
    with database.connection() as connection:
        return connection.info.parameter_status("server_version")
