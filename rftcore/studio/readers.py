"""SQL that people write: it reads the buffer and can do nothing else, within limits (docs/decisions/0060).

An account that has signed in and can do nothing but read and label uses its own connections; all others use a login of this studio that may read alone.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import anyio.from_thread
import psycopg
from fastapi import HTTPException, Request

from rftcore.studio.sessions import Session
from rftdata.buffer import Buffer
from rftdata.errors import BufferUnavailableError
from rftdata.maintenance.reader_login import ReaderLogin, is_plain_account
from rftdata.query.limits import limited

LIMIT_S = 5.0
_AT_ONCE = 2
_POLL_S = 0.1
R = TypeVar("R")
Connection = psycopg.Connection[dict[str, Any]]


class Readers:
    """The reading connections of a studio; safe for threads.

    Args:
        buffer: with the account that started the studio.
    """

    def __init__(self, buffer: Buffer) -> None:
        self._login = ReaderLogin(buffer)
        self._slots = threading.BoundedSemaphore(_AT_ONCE)

    def read(self, request: Request, session: Session, action: Callable[[Connection], R]) -> R:
        """Return the result of `action` in a read-only transaction with limits; it is cancelled when the browser disconnects.

        Raises:
            QueryError: the database rejected a statement, or it took longer than `LIMIT_S`.
            HTTPException: as many queries as are allowed at once are running.
        """
        if not self._slots.acquire(blocking=False):
            raise HTTPException(
                429, f"{_AT_ONCE} queries are running already. Wait until one has ended, then try again."
            )
        try:
            is_own = not session.is_owner and is_plain_account(session.buffer)
            buffer = session.buffer if is_own else self._login.buffer()
            with buffer.database.reading() as connection:
                return limited(
                    connection, LIMIT_S, lambda: _unless_left(request, connection, lambda: action(connection))
                )
        finally:
            self._slots.release()

    def close(self) -> None:
        """Drop the login; if the database is away, it expires."""
        with contextlib.suppress(BufferUnavailableError):
            self._login.close()


def _unless_left(request: Request, connection: Connection, action: Callable[[], R]) -> R:
    """Return the result of an action that uses a connection; cancel it once the browser has disconnected or the time is over."""
    deadline = time.monotonic() + LIMIT_S + 1
    is_cancelled = False
    with concurrent.futures.ThreadPoolExecutor(1, "studio-query") as pool:
        future = pool.submit(action)
        while not concurrent.futures.wait([future], _POLL_S).done:
            # In the event loop, which reads what the browser sends.
            if not is_cancelled and (time.monotonic() > deadline or anyio.from_thread.run(request.is_disconnected)):
                connection.cancel_safe()
                is_cancelled = True
        return future.result()
