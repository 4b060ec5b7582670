"""Limits of SQL that a person writes and a page runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import psycopg
import psycopg.errors

from rftdata.errors import QueryError
from rftdata.postgres.database import Connection, execute, limit_statements
from rftdata.postgres.query_errors import query_error

R = TypeVar("R")


def limited(connection: Connection, limit_s: float, action: Callable[[], R]) -> R:
    """Return the result of an action whose statements the server cancels after a time; names without a schema are those of rft.

    Args:
        connection: in a transaction (`Database.reading`).

    Raises:
        QueryError: the database rejected a statement, or it took longer.
    """
    execute(connection, "rft_search_path")
    limit_statements(connection, limit_s)
    try:
        return action()
    except psycopg.errors.QueryCanceled as error:
        raise QueryError(
            f"the query did not end within {limit_s:g} s", todo="let it read less: one run, a range of ids, a LIMIT"
        ) from error
    except psycopg.Error as error:
        # A parameter, which no query here has, counts as a violation of the protocol.
        if isinstance(error, psycopg.OperationalError) and not isinstance(error, psycopg.errors.ProtocolViolation):
            raise
        raise query_error(error) from error
