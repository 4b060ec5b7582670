"""Connections for SQL that people write: they read the buffer and can do nothing else (docs/decisions/0057).

An account that has signed in and holds no role but `rft_reader` and `rft_labeler` uses its own connections. All others, among them the owner
of an embedded buffer, use a login of this studio that holds `rft_reader` alone: what such a session does to its role, its settings or its
transaction gives it no further right. The studio makes that login when it is first needed, keeps its password in memory, and drops it when it ends.
If a studio is killed, its login expires, and the next studio drops it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import datetime
import secrets
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import anyio.from_thread
import psycopg
from fastapi import HTTPException, Request
from psycopg import sql

from rftcore.studio.sessions import Session
from rftdata.buffer import Buffer
from rftdata.connection import open_as
from rftdata.errors import QueryError
from rftdata.postgres.database import Connection, Database, execute, limit_statements
from rftdata.postgres.query_errors import query_error

LIMIT_S = 5.0
_AT_ONCE = 2
_POLL_S = 0.1
_LIFE = datetime.timedelta(days=1)
_PREFIX = "rft_studio_reader_"
R = TypeVar("R")


class Readers:
    """The reading connections of a studio; safe for threads.

    Args:
        buffer: with the account that started the studio, which makes the login.
    """

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(_AT_ONCE)
        self._login: tuple[str, Buffer, datetime.datetime] | None = None

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
            with self._database(session).reading() as connection:
                return _limited(request, connection, action)
        finally:
            self._slots.release()

    def close(self) -> None:
        """Drop the login."""
        with self._lock:
            self._drop_login()

    def _database(self, session: Session) -> Database:
        if not session.is_owner and session.buffer.database.fetch("studio_is_plain")[0]["is_plain"]:
            return session.buffer.database
        with self._lock:
            now = datetime.datetime.now(datetime.UTC)
            if self._login is None or self._login[2] < now:
                self._drop_login()
                self._login = (*self._new_login(now + 2 * _LIFE), now + _LIFE)
            return self._login[1].database

    def _new_login(self, until: datetime.datetime) -> tuple[str, Buffer]:
        name, password = _PREFIX + secrets.token_hex(8), secrets.token_urlsafe(32)
        try:
            self._drop_expired()
            with self._buffer.database.transaction() as connection:
                # As the server stores it, so that no log of statements has the password.
                stored = connection.pgconn.encrypt_password(password.encode(), name.encode(), b"scram-sha-256").decode()
                connection.execute(
                    sql.SQL(
                        "CREATE ROLE {} LOGIN PASSWORD {} CONNECTION LIMIT {} VALID UNTIL {} IN ROLE rft_reader"
                    ).format(
                        sql.Identifier(name),
                        sql.Literal(stored),
                        sql.Literal(_AT_ONCE + 1),
                        sql.Literal(until.isoformat()),
                    )
                )
        except psycopg.errors.InsufficientPrivilege as error:
            raise QueryError(
                "the account that started the studio may not make the limited login with which it reads SQL of people",
                todo="sign in with an account that holds rft_reader or rft_labeler alone",
            ) from error
        return name, open_as(self._buffer, name, password, application="rft studio, SQL", patience_s=2.0)

    def _drop_login(self) -> None:
        if self._login is not None:
            name, buffer, _ = self._login
            self._login = None
            buffer.close()
            self._drop(name)

    def _drop_expired(self) -> None:
        for row in self._buffer.database.fetch("studio_expired_readers"):
            self._drop(row["name"])

    def _drop(self, name: str) -> None:
        # Another studio may drop it, too, and a server that is away drops nothing: the login expires.
        with contextlib.suppress(psycopg.Error), self._buffer.database.connection() as connection:
            connection.execute(sql.SQL("DROP ROLE IF EXISTS {}").format(sql.Identifier(name)))


def _limited(request: Request, connection: Connection, action: Callable[[Connection], R]) -> R:
    execute(connection, "studio_search_path")
    limit_statements(connection, LIMIT_S)
    try:
        return _unless_left(request, connection, lambda: action(connection))
    except psycopg.errors.QueryCanceled as error:
        raise QueryError(
            f"the query did not end within {LIMIT_S:g} s", todo="let it read less: one run, a range of ids, a LIMIT"
        ) from error
    except psycopg.Error as error:
        # A parameter, which no query here has, counts as a violation of the protocol.
        if isinstance(error, psycopg.OperationalError) and not isinstance(error, psycopg.errors.ProtocolViolation):
            raise
        raise query_error(error) from error


def _unless_left(request: Request, connection: Connection, action: Callable[[], R]) -> R:
    """Return the result of an action that uses a connection; cancel it once the browser has disconnected or the time is over."""
    deadline = time.monotonic() + LIMIT_S + 1
    is_cancelled = False
    with concurrent.futures.ThreadPoolExecutor(1, "studio-query") as pool:
        future = pool.submit(action)
        while True:
            with contextlib.suppress(concurrent.futures.TimeoutError):
                return future.result(_POLL_S)
            # In the event loop, which reads what the browser sends.
            if not is_cancelled and (time.monotonic() > deadline or anyio.from_thread.run(request.is_disconnected)):
                connection.cancel_safe()
                is_cancelled = True
