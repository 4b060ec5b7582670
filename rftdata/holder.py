"""The trainer that holds a run: whether its process may still be at work, as seen by a transaction that has locked the run.

What a live trainer relies on does not change under it: neither a second attempt nor other settings are stored. Both are decided in the
transaction that stores them, because a trainer may start at any time.
"""

from __future__ import annotations

import uuid

from rftdata.errors import FencedError
from rftdata.postgres.database import Connection, Row, fetch
from rftdata.processes import has_ended

# Receipts of this process's attempts that no object holds, whatever the database knows: closed ones, and those whose start failed.
_unheld: set[uuid.UUID] = set()


def mark_unheld(receipt: uuid.UUID) -> None:
    """Record that no object of this process holds the attempt of a receipt any more."""
    _unheld.add(receipt)


def live_holder(connection: Connection, run: Row) -> Row | None:
    """Return the attempt that holds a run if its trainer may still be at work.

    Args:
        run: its row, locked by the transaction if the answer is to stay true.
    """
    if run["current_attempt_id"] is None:
        return None
    (holder,) = fetch(connection, "attempt_holder", attempt_id=run["current_attempt_id"])
    ended = has_ended(holder["host"], holder["pid"], holder["pid_space"], holder["pid_started"])
    return None if ended or not holder["alive"] or holder["receipt"] in _unheld else holder


def refuse_if_held(connection: Connection, run: Row, what: str = "") -> None:
    """Refuse a change of a run while a trainer holds it.

    Args:
        run: its row, locked.
        what: the end of the message: what cannot be done meanwhile.

    Raises:
        FencedError: a trainer holds it.
    """
    holder = live_holder(connection, run)
    if holder is not None:
        raise FencedError(
            f"the run {run['name']!r} is being trained by process {holder['pid']} on {holder['host']}{what}",
            todo="stop that process first, or wait until its lease ends",
        )
