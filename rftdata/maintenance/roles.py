"""The roles of a buffer's database, rft_reader, rft_labeler and rft_worker, and their rights (docs/reference/rights.md)."""

from __future__ import annotations

from rftdata.postgres.database import Database, fetch


def grant_roles(database: Database) -> tuple[list[str], list[str]]:
    """Create the roles of `rft.create_roles` if this account may, and grant their rights; return those created and granted.

    Raises:
        QueryError: this account does not own the schema.
    """
    with database.transaction() as connection:
        row = fetch(connection, "create_and_grant_roles")[0]
    return list(row["made"]), list(row["granted"])
