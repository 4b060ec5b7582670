"""Which runs are archived, and the refusal of requests that need one of them whole.

The database refuses changes of archived runs by itself (`rft.refuse_archived_change`). The functions here are for requests that would
read what is not there.
"""

from __future__ import annotations

from collections.abc import Sequence

from rftdata.errors import ArchivedError
from rftdata.postgres.database import Connection, Database, Row, fetch


def archived_runs(database: Database, run_ids: Sequence[int] | None = None) -> list[Row]:
    """Return `run_id` and `run`, the name, of the archived ones among runs; None for all runs."""
    return database.fetch("archived_among", run_ids=None if run_ids is None else list(run_ids))


def refuse_archived(connection: Connection, run_id: int, purpose: str) -> None:
    """Refuse a request that needs a whole run, in the request's own transaction.

    Args:
        purpose: what cannot be done, such as "it cannot be forked".

    Raises:
        ArchivedError: the run is archived.
    """
    for row in fetch(connection, "archived_among", run_ids=[run_id]):
        raise is_archived(row["run"], purpose)


def refuse_archived_experiences(database: Database, experience_ids: Sequence[int], purpose: str) -> None:
    """Refuse a request that needs experiences of which one is archived; raises as `refuse_archived` does."""
    for row in database.fetch("archived_experiences_among", experience_ids=list(experience_ids)):
        raise is_archived(row["run"], f"{purpose} (experience {row['experience_id']})")


def is_archived(run: str, purpose: str) -> ArchivedError:
    """Return the error for a request that needs an archived run."""
    return ArchivedError(
        f"the run {run!r} is archived: {purpose}", todo=f"bring it back first: `rft restore-run {run}`"
    )
