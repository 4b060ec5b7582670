"""A login of the database that holds `rft_reader` alone, for a process that runs SQL of people (docs/decisions/0060).

What such a session does to its role, its settings or its transaction gives it no further right. The login is made when it is first needed and dropped with
the object; its password stays in memory. After a kill it expires, and the next one that is made drops it.
"""

from __future__ import annotations

import contextlib
import datetime
import secrets
import threading

import psycopg
import psycopg.errors
from psycopg import sql

from rftdata.buffer import Buffer
from rftdata.connection import open_as
from rftdata.errors import QueryError

_LIFE = datetime.timedelta(days=1)
# More than there are at once: a connection counts until its process at the server has ended.
_MAX_CONNECTIONS = 8
_PREFIX = "rft_studio_reader_"


def is_plain_account(buffer: Buffer) -> bool:
    """Return whether the account of a buffer can do nothing but read and label."""
    return bool(buffer.database.fetch("is_plain_account")[0]["is_plain"])


class ReaderLogin:
    """The login; safe for threads.

    Args:
        buffer: with an account that may create roles.
    """

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self._lock = threading.Lock()
        self._login: tuple[str, Buffer, datetime.datetime] | None = None

    def buffer(self) -> Buffer:
        """Return the buffer with connections of the login.

        Raises:
            QueryError: the account may not create the login.
        """
        with self._lock:
            now = datetime.datetime.now(datetime.UTC)
            if self._login is None or self._login[2] < now:
                self._end()
                self._login = (*self._make(now + 2 * _LIFE), now + _LIFE)
            return self._login[1]

    def close(self) -> None:
        """Drop the login."""
        with self._lock:
            self._end()

    def _make(self, until: datetime.datetime) -> tuple[str, Buffer]:
        name, password = _PREFIX + secrets.token_hex(8), secrets.token_urlsafe(32)
        try:
            for row in self._buffer.database.fetch("expired_reader_logins"):
                self._drop(row["name"])
            with self._buffer.database.connection() as connection:
                # As the server stores it, so that no log of statements has the password.
                stored = connection.pgconn.encrypt_password(password.encode(), name.encode(), b"scram-sha-256")
                values = [sql.Literal(each) for each in (stored.decode(), _MAX_CONNECTIONS, until.isoformat())]
                statement = "CREATE ROLE {} LOGIN PASSWORD {} CONNECTION LIMIT {} VALID UNTIL {} IN ROLE rft_reader"
                connection.execute(sql.SQL(statement).format(sql.Identifier(name), *values))
        except psycopg.errors.InsufficientPrivilege as error:
            raise QueryError(
                "this account may not make the limited login that SQL of people needs",
                todo="sign in with an account that holds rft_reader or rft_labeler alone",
            ) from error
        return name, open_as(self._buffer, name, password, application="rft studio, SQL", patience_s=2.0)

    def _end(self) -> None:
        if self._login is not None:
            name, buffer, _ = self._login
            self._login = None
            buffer.close()
            self._drop(name)

    def _drop(self, name: str) -> None:
        # Another studio may drop it, too; if the server is away, the login expires.
        with contextlib.suppress(psycopg.Error), self._buffer.database.connection() as connection:
            connection.execute(sql.SQL("DROP ROLE IF EXISTS {}").format(sql.Identifier(name)))
