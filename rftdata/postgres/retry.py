"""Riding out a restart of the database: doing again what may be done again, for a bounded time.

Only what reads, or what leaves the same when it is done twice, may go through `ride_out`: the answer to a commit can be lost, so a
statement that failed may have been carried out. Everything else raises at once, as before.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import psycopg
from psycopg_pool import PoolTimeout

from rftdata.errors import BufferUnavailableError

RIDE_OUT_S = 30.0
_PAUSE_S = 0.25
# Connection failures, a server that shuts down, crashed, or still starts, and a transaction that it ended because this process stood still.
_SQLSTATES = ("08", "57P01", "57P02", "57P03", "25P03")

T = TypeVar("T")


def ride_out(
    action: Callable[[], T], *, between: Callable[[], object] | None = None, limit_s: float | None = None
) -> T:
    """What `action` returns; it is called again while the database cannot be reached.

    Args:
        action: may have been carried out although it raised.
        between: called, and ridden out itself, before `action` is called again.
        limit_s: begin no further try after this long; `RIDE_OUT_S` by default.

    Raises:
        BufferUnavailableError: the database did not come back, or refuses us for another reason.
    """
    deadline = None
    while True:
        try:
            if deadline is not None and between is not None:
                between()
            return action()
        except BufferUnavailableError as error:
            now = time.monotonic()
            deadline = deadline or now + (RIDE_OUT_S if limit_s is None else limit_s)
            if now >= deadline or not is_outage(error):
                raise
            time.sleep(_PAUSE_S)


def is_outage(error: BufferUnavailableError) -> bool:
    """Whether the database is away and may come back, rather than refusing us."""
    cause = error.__cause__
    if isinstance(cause, PoolTimeout):
        return True
    if not isinstance(cause, psycopg.OperationalError | psycopg.errors.IdleInTransactionSessionTimeout):
        return False
    return cause.sqlstate is None or cause.sqlstate.startswith(_SQLSTATES)
