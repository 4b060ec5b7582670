"""Connections and named queries.

SQL is read from the folder `sql/` (in a wheel: `rftdata/sql/`). A query file consists of blocks that begin with
`-- name: the_name` and a comment on the purpose of the query; parameters are psycopg's `%(name)s`. `-- name: the_name (read)` marks a
query that neither changes nor locks anything. Only such a query is repeated when its answer is lost. Connections are autocommit; statements
that belong together run in `Database.transaction()`. Passwords never appear in messages (`redacted`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg
import psycopg.errors
from psycopg.rows import DictRow, dict_row
from psycopg_pool import ConnectionPool, PoolTimeout

from rftdata.errors import (
    BufferUnavailableError,
    QueryError,
    RftError,
    SchemaVersionError,
)
from rftdata.limits import is_storable
from rftdata.postgres.driver_errors import one_line, translated
from rftdata.postgres.lost_peers import client_settings, is_remote, server_settings
from rftdata.postgres.retry import ride_out
from rftdata.postgres.values import ADAPTERS, recorded
from rftdata.uri import redacted

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
R = TypeVar("R")
# The pool logs a warning per attempt; our errors report the result.
logging.getLogger("psycopg.pool").setLevel(logging.ERROR)

Row = dict[str, Any]
Connection = psycopg.Connection[DictRow]
Cursor = psycopg.Cursor[DictRow]

_MINIMUM_SERVER = 150000
_CONNECT_S = 8.0
# Interval between connection attempts while the server is unavailable. The pool's own pauses double: 1 s, 2 s, 4 s, …
_TRY_AGAIN_S = 0.2
# Parameters of named queries with a text about an error or a state (`rftdata.postgres.values.recorded`). They may come from models,
# users' functions or other programs.
_RECORDED = frozenset(
    {
        "activities",
        "details",
        "error",
        "errors",
        "finish_reason",
        "outcome",
        "reason",
        "reasons",
        "state",
        "waiting_for",
    }
)


@cache
def sql_folder() -> Path:
    """Return the folder with migrations and queries: in this package for a wheel, at the top of a checkout otherwise."""
    here = Path(__file__).resolve().parents[1]
    inside = here / "sql"
    return inside if inside.is_dir() else here.parent / "sql"


# A query that only reads is marked after its name.
_HEADER = re.compile(r"(\w+)( \(read\))?")


@cache
def _blocks() -> Mapping[str, tuple[str, bool]]:
    """Return the text of all named queries, and whether each only reads."""
    blocks: dict[str, tuple[str, bool]] = {}
    for file in sorted((sql_folder() / "queries").glob("*.sql")):
        for block in re.split(r"^-- name: ", file.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
            header, _, body = block.partition("\n")
            match = _HEADER.fullmatch(header.strip())
            assert match is not None, f"{file.name}: the name of a query is one word, or `the_name (read)`: {header!r}"
            assert match[1] not in blocks, f"two queries are named {match[1]}"
            blocks[match[1]] = body.strip().rstrip(";"), match[2] is not None
    return blocks


@cache
def queries() -> Mapping[str, str]:
    """Return all named queries."""
    return {name: text for name, (text, _) in _blocks().items()}


@cache
def reads() -> frozenset[str]:
    """Return the names of queries marked `(read)`: they change and lock nothing, and are therefore safe to repeat."""
    return frozenset(name for name, (_, is_read) in _blocks().items() if is_read)


class Database:
    """A pool of connections to one database.

    Args:
        uri: postgresql:// URL.
        max_connections: size of the pool.
        application: shown in `pg_stat_activity`.
        patience_s: how long read-only queries are repeated while the server is unavailable; `RIDE_OUT_S` by default.
        idle_s: seconds of inactivity after which the server aborts a transaction, with its locks, because this process may be suspended;
            None for no limit.
        unused_s: seconds after which the pool begins to close connections that nothing uses.
    """

    def __init__(
        self,
        uri: str,
        *,
        max_connections: int = 8,
        application: str = "rft",
        patience_s: float | None = None,
        idle_s: float | None = None,
        unused_s: float = 600.0,
    ) -> None:
        self.uri, self._idle_s, self._pid = uri, idle_s, os.getpid()
        self._patience_s = patience_s
        self._connect_s = _CONNECT_S if patience_s is None else min(_CONNECT_S, max(1.0, patience_s))
        self._connections: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._connections_lock = threading.Lock()
        try:
            with translated(uri):
                self._settings: dict[str, Any] = {"connect_timeout": 10, "context": ADAPTERS, **client_settings(uri)}
                with psycopg.connect(uri, **self._settings) as connection:
                    version = connection.info.server_version
        except psycopg.ProgrammingError as error:
            raise BufferUnavailableError(
                "buffer.uri is not a connection string",
                value=redacted(uri),
                allowed="postgresql://USER@HOST:PORT/DATABASE",
                todo="correct it",
            ) from error
        if version < _MINIMUM_SERVER:
            raise SchemaVersionError(
                "the server's PostgreSQL is too old",
                value=version // 10000,
                allowed="15 or newer",
                todo="use a newer server",
            )
        self._pool: ConnectionPool[Connection] = ConnectionPool(
            uri,
            min_size=0,
            max_size=max_connections,
            max_idle=unused_s,
            reconnect_timeout=0.0,
            kwargs={
                "autocommit": True,
                "row_factory": dict_row,
                "application_name": application,
                **self._settings,
            },
            configure=self._register,
            open=False,
        )
        self._pool.open()

    def close(self) -> None:
        self._pool.close()

    def _register(self, connection: Connection) -> None:
        _prepare(connection)
        if self._idle_s is not None:
            execute(connection, "abort_idle_transactions", limit_ms=math.ceil(1000 * self._idle_s))
        with self._connections_lock:
            self._connections.add(connection)

    def refuse_other_process(self) -> None:
        """Raise an RftError in a process that was forked since: both would read answers from one connection, and locks may be held."""
        if os.getpid() != self._pid:
            raise RftError(
                "the buffer was opened in another process, from which this one was forked",
                value=self._pid,
                allowed=str(os.getpid()),
                todo="open it again in this process",
            )

    def own_pids(self) -> list[int]:
        """Return the process ids, on the server, of the sessions in this pool."""
        with self._connections_lock:
            return [connection.info.backend_pid for connection in self._connections if not connection.closed]

    def server_address(self) -> str | None:
        """Return the server's IP address; None for a unix socket."""
        with self.connection() as connection:
            return connection.info.hostaddr if is_remote(connection) else None

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        """Yield a pooled autocommit connection."""
        self.refuse_other_process()
        with translated(self.uri):
            connection = self._working_connection()
            try:
                with connection:
                    yield connection
            finally:
                self._pool.putconn(connection)

    def _working_connection(self) -> Connection:
        """Return a connection from the pool whose server answers; the caller puts it back.

        Raises:
            PoolTimeout: there was none within `_connect_s`.
        """
        deadline = time.monotonic() + self._connect_s
        while True:
            with contextlib.suppress(PoolTimeout):
                connection = self._pool.getconn(_TRY_AGAIN_S)  # each call makes the pool try again
                if self._answers(connection):
                    return connection
            if time.monotonic() >= deadline:
                raise PoolTimeout(f"no connection after {self._connect_s:g} s")

    def _answers(self, connection: Connection) -> bool:
        """Return whether the server answers; otherwise return the connection to the pool, which discards it."""
        answers = False
        try:
            ConnectionPool.check_connection(connection)
            answers = True
        except psycopg.OperationalError:
            pass
        finally:
            if not answers:
                self._pool.putconn(connection)
        return answers

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Yield a connection in a transaction: committed at the end, rolled back on an exception."""
        with self.connection() as connection, connection.transaction():
            yield connection

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Yield a separate connection in a transaction that sees one snapshot and changes nothing.

        Texts that a person wrote run here: the settings that they make and the locks that they take end with the connection.
        """
        with translated(self.uri), self.dedicated() as connection:
            connection.autocommit = False
            connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            connection.read_only = True
            yield connection

    def dedicated(self) -> Connection:
        """Open a connection outside the pool, for LISTEN or locks across transactions; the caller closes it."""
        self.refuse_other_process()
        with translated(self.uri):
            connection = psycopg.connect(
                self.uri, autocommit=True, row_factory=dict_row, application_name="rft-listen", **self._settings
            )
            _prepare(connection)
            return connection

    def fetch(self, name: str, /, **parameters: Any) -> list[Row]:
        """Return the rows of a named query; a query that only reads is repeated while the server restarts."""
        if name not in reads():
            return self._fetch(name, parameters)
        return ride_out(lambda: self._fetch(name, parameters), limit_s=self._patience_s)

    def _fetch(self, name: str, parameters: dict[str, Any]) -> list[Row]:
        with self.connection() as connection:
            return fetch(connection, name, **parameters)

    def fetch_by_index(self, name: str, /, **parameters: Any) -> list[Row]:
        """Return the rows of a query that reads few rows of large tables, planned by index whatever the statistics of the tables."""

        def ask() -> list[Row]:
            with self.transaction() as connection, connection.pipeline():
                send(connection, "plan_by_index")
                return send(connection, name, **parameters).fetchall()

        return ride_out(ask, limit_s=self._patience_s)

    def ride_out(self, action: Callable[[], R]) -> R:
        """Return the result of `action`, repeated for as long as queries are; a repetition must have no further effect."""
        return ride_out(action, limit_s=self._patience_s)

    def run(self, name: str, /, **parameters: Any) -> int:
        """Run a named statement; return the number of affected rows."""
        with self.connection() as connection:
            return execute(connection, name, **parameters)


def _prepare(connection: Connection) -> None:
    connection.execute(queries()["prepare_session"], server_settings())


def fetch(connection: Connection, name: str, /, **parameters: Any) -> list[Row]:
    """Return the rows of a named query on a given connection."""
    return send(connection, name, **parameters).fetchall()


def execute(connection: Connection, name: str, /, **parameters: Any) -> int:
    """Run a named statement on a given connection; return the number of affected rows."""
    return send(connection, name, **parameters).rowcount


def records(kind: type[T], rows: Iterable[Row]) -> list[T]:
    """Convert rows to objects of a dataclass whose fields are columns of the rows."""
    names = [f.name for f in dataclasses.fields(kind)]
    return [kind(**{name: row[name] for name in names}) for row in rows]


def limit_statements(connection: psycopg.Connection[Any], seconds: float) -> None:
    """Let the server cancel every statement of the current transaction that takes longer."""
    connection.execute(queries()["limit_statements"], {"limit": f"{max(1, round(seconds * 1000))}ms"})


def send(connection: Connection, name: str, /, **parameters: Any) -> Cursor:
    """Start a named query. Inside `connection.pipeline()` it is only queued, and the cursor has rows after that block.

    Texts about errors and states are stored with U+FFFD in place of what PostgreSQL cannot hold.

    Raises:
        QueryError: another text has NUL or half a surrogate pair.
    """
    for parameter in _RECORDED.intersection(parameters):
        parameters[parameter] = recorded(parameters[parameter])
    try:
        return connection.execute(queries()[name], parameters)
    except (UnicodeEncodeError, psycopg.DataError) as error:
        if isinstance(error, psycopg.DataError) and error.sqlstate is not None:
            raise  # of the server, and in a pipeline of an earlier query
        raise _unstorable(parameters, error) from error


def _unstorable(parameters: Mapping[str, Any], error: Exception) -> QueryError:
    """Return the error of the first parameter that the driver refused to send."""
    for name, value in parameters.items():
        for text in value if isinstance(value, list | tuple) else (value,):
            if isinstance(text, str) and not is_storable(text):
                return QueryError(
                    f"the value of {name} cannot be stored",
                    value=text[:200],
                    allowed="a text without NUL and half surrogate pairs",
                    todo="correct it; nothing was stored",
                )
    return QueryError(f"a value cannot be stored: {one_line(error)}", todo="correct it; nothing was stored")


def one(cursor: Cursor) -> Row:
    """Return the only row of a cursor."""
    (row,) = cursor.fetchall()
    return row


def copy_rows(
    connection: Connection, table: str, columns: Sequence[tuple[str, str]], rows: Iterator[Sequence[Any]]
) -> None:
    """Write rows with a binary COPY.

    Args:
        table: qualified name.
        columns: (name, type) pairs.
        rows: values in that order of columns.
    """
    names = ", ".join(name for name, _ in columns)
    with connection.cursor() as cursor, cursor.copy(f"COPY {table} ({names}) FROM STDIN (FORMAT BINARY)") as copy:
        copy.set_types([type_name for _, type_name in columns])
        for row in rows:
            copy.write_row(row)
