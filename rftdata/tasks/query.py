"""Rows of a query: `sql: SELECT …` on the buffer itself, or on another PostgreSQL.

`args`: `url` (postgresql://…; its password is never stored) or `url_env` (the name of an environment variable that contains it).
The query runs read-only and its rows are fetched in portions, so a table of any size may be a source.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import psycopg
from psycopg.rows import dict_row

from rftdata.config import TasksetConfig
from rftdata.errors import TaskSourceError
from rftdata.postgres.database import Database, limit_statements
from rftdata.uri import redacted
from rftdata.user_code.time_limits import lowered

_PREFIX = "sql:"
_PORTION = 4096


def is_query(source: str) -> bool:
    return source.startswith(_PREFIX)


def asks_buffer(config: TasksetConfig) -> bool:
    """Return whether the source is a query on the buffer itself."""
    return is_query(config.source) and not {"url", "url_env"} & set(config.args)


def rows(config: TasksetConfig, database: Database | None) -> Iterator[dict[str, Any]]:
    """Yield the rows of the query, by column name.

    Raises:
        TaskSourceError: no connection, or the server refuses the query.
    """
    statement = config.source.removeprefix(_PREFIX).strip().rstrip(";")
    uri = _uri(config, database)
    try:
        with psycopg.connect(uri, row_factory=dict_row, connect_timeout=10, application_name="rft tasks") as connection:
            connection.read_only = True
            # The server enforces the limit itself, because a connection cannot be interrupted from outside.
            limit_s = lowered(config.timeout_s)
            limit_statements(connection, limit_s)
            # A server-side cursor accepts exactly one statement that returns rows.
            with connection.cursor(name="rft_tasks") as cursor:
                cursor.itersize = _PORTION
                cursor.execute(statement)
                _check_columns(config, [column.name for column in cursor.description or ()])
                yield from cursor
    except psycopg.errors.QueryCanceled as error:
        raise TaskSourceError(
            f"the query of the taskset {config.name!r} did not return its next rows within {limit_s:g} s",
            value=statement,
            todo=f"correct it, or raise timeout_s of the taskset {config.name!r}",
        ) from error
    except psycopg.OperationalError as error:
        raise TaskSourceError(
            f"the database of the taskset {config.name!r} cannot be used: {redacted(' '.join(str(error).split()))}",
            value=redacted(uri),
            todo="start it, or correct args.url (host, port, user, password, database)",
        ) from None
    except psycopg.Error as error:
        if isinstance(error, psycopg.DataError) and error.sqlstate is None:  # not the server's
            raise _unreadable(config, statement, error) from error
        raise TaskSourceError(
            f"the query of the taskset {config.name!r} is refused: {_message(error)}",
            value=statement,
            allowed="one SELECT that changes nothing",
            todo="correct it",
        ) from error
    except (ValueError, OverflowError, RecursionError) as error:
        raise _unreadable(config, statement, error) from error


def _unreadable(config: TasksetConfig, statement: str, error: Exception) -> TaskSourceError:
    """The error of a value that Python cannot hold, as an infinite date or a number of thousands of digits."""
    return TaskSourceError(
        f"a row of the query of the taskset {config.name!r} cannot be read: {error}",
        value=statement,
        todo="leave that column out, or cast it to text",
    )


def _message(error: psycopg.Error) -> str:
    """Return the server's message without its excerpt of the statement, which contains a cursor that the user did not write."""
    said = error.diag
    parts = [said.message_primary or str(error).split("\nLINE ")[0], said.message_detail, said.message_hint]
    return "; ".join(" ".join(part.split()).rstrip(".") for part in parts if part)


def _uri(config: TasksetConfig, database: Database | None) -> str:
    unknown = sorted(set(config.args) - {"url", "url_env"})
    if unknown or len(config.args) > 1:
        raise TaskSourceError(
            "a query takes either url or url_env" if not unknown else f"a query has no argument {unknown[0]!r}",
            allowed="url, url_env, or neither for the buffer itself",
            todo=f"correct args of the taskset {config.name!r}",
        )
    if "url_env" in config.args:
        name = str(config.args["url_env"])
        if name not in os.environ:
            raise TaskSourceError(
                f"the environment variable {name!r}, which the taskset {config.name!r} gets its URL from, is not set",
                todo="set it to postgresql://USER:PASSWORD@HOST/DATABASE",
            )
        return os.environ[name]
    if "url" in config.args:
        return str(config.args["url"])
    if database is None:
        raise TaskSourceError(
            f"the taskset {config.name!r} queries the buffer, which is not open", todo="load it with `rft tasks load`"
        )
    return database.uri


def _check_columns(config: TasksetConfig, names: list[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise TaskSourceError(
            f"the query of the taskset {config.name!r} returns the column {twice[0]!r} twice",
            todo="give every column a different name with AS",
        )
