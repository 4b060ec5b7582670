"""Retries across a restart of the database, for a bounded time.

Only statements that read, or that have the same effect when repeated, may use `ride_out`: the answer to a commit can be lost, so a
statement that failed may have been carried out. All others raise at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import psycopg
import psycopg.errors
from psycopg_pool import PoolTimeout

from rftdata.errors import BufferUnavailableError

RIDE_OUT_S = 30.0
PAUSE_S = 0.25
# Connection failures, a server that shuts down, has crashed or is starting, and a transaction aborted because this process was suspended.
_OUTAGES = ("08", "57P01", "57P02", "57P03", "25P03")
# A connection that was refused for another reason or ended: account, database, too many connections, a session that was idle too long.
_REFUSALS = ("28", "3D", "53300", "57P")

T = TypeVar("T")


def ride_out(
    action: Callable[[], T], *, between: Callable[[], object] | None = None, limit_s: float | None = None
) -> T:
    """Return the result of `action`, called again while the database is unreachable.

    Args:
        action: may have been carried out although it raised.
        between: called, with the same retries, before `action` is called again.
        limit_s: seconds after which no further try begins; `RIDE_OUT_S` by default.

    Raises:
        BufferUnavailableError: the database did not return in time, or refused the connection for another reason.
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
            time.sleep(PAUSE_S)


def is_unavailable(error: Exception) -> bool:
    """Return whether a driver's error means that there is no connection (any more). Any other error is the server's answer to a statement.

    The driver's class does not distinguish them: it is the same for a lost connection and for a key that is too long for an index.
    """
    if isinstance(error, PoolTimeout):
        return True
    if not isinstance(error, psycopg.Error) or isinstance(error, psycopg.errors.PipelineAborted):
        return False
    return error.sqlstate is None or error.sqlstate.startswith((*_OUTAGES, *_REFUSALS))


def is_outage(error: BufferUnavailableError) -> bool:
    """Return whether the database is temporarily unavailable, instead of refusing the connection."""
    cause = error.__cause__
    if isinstance(cause, PoolTimeout):
        return True
    if not isinstance(cause, psycopg.OperationalError | psycopg.errors.IdleInTransactionSessionTimeout):
        return False
    return cause.sqlstate is None or cause.sqlstate.startswith(_OUTAGES)


def proves_rollback(error: Exception) -> bool:
    """Return whether the server reported the error of a transaction, so that nothing of it was stored. Otherwise the answer was lost."""
    cause = error if isinstance(error, psycopg.Error) else error.__cause__
    state = cause.sqlstate if isinstance(cause, psycopg.Error) else None
    return state is not None and not state.startswith(_OUTAGES)
