"""SQL that a person writes: a condition or a query, which becomes part of a statement of ours.

PostgreSQL itself decides whether the text is complete. Alone at the end of a statement, a parenthesis, string, comment or dollar quote that the text leaves
open or closes too often is a syntax error, as is a second statement. Inside parentheses, whatever may follow a condition or a query is one. A
text that is accepted both ways is one expression, and cannot end or widen what stands around it.

Such texts run on a connection of their own (`Database.reading`).
"""

from __future__ import annotations

from typing import Any

import psycopg
import psycopg.errors
from psycopg import sql

from rftdata.errors import QueryError
from rftdata.postgres.query_errors import query_error


def check_condition(connection: psycopg.Connection[Any], where: str) -> None:
    """Refuse a text that is not one condition over the columns of rft.v_experience; nothing of it is executed.

    Raises:
        QueryError: PostgreSQL rejected it; the message quotes it.
    """
    try:
        check_complete(connection, where, "SELECT FROM rft.v_experience WHERE {}")
    except psycopg.DatabaseError as error:
        # A parameter, which no condition has, counts as a violation of the protocol.
        if isinstance(error, psycopg.OperationalError) and not isinstance(error, psycopg.errors.ProtocolViolation):
            raise
        raise condition_error(error, where) from error


def check_complete(connection: psycopg.Connection[Any], text: str, statement: str) -> None:
    """Let PostgreSQL parse and plan a text at the end of a statement, in parentheses and without.

    Args:
        statement: has {} in place of the text.

    Raises:
        psycopg.DatabaseError: it is not complete, or not valid.
    """
    # On separate lines, because the text may end in a comment. In binary, because that protocol takes only one statement. In parentheses
    # first: what is accepted there is no option of EXPLAIN.
    for written in (f"(\n{text}\n)", f"\n{text}"):
        connection.cursor(binary=True).execute(f"EXPLAIN {statement.replace('{}', written)}".encode())


def in_parentheses(where: str) -> sql.Composable:
    """Return a condition that `check_condition` accepted, as part of a statement."""
    return sql.SQL("(\n{}\n)").format(sql.SQL(where))


def condition_error(error: psycopg.DatabaseError, where: str | None) -> QueryError:
    """Return the error of a condition that PostgreSQL rejected."""
    refused = query_error(error)
    return QueryError(
        f"the condition cannot be used: {refused.what}",
        value=where,
        allowed="one condition in SQL over the columns of rft.v_experience, such as: reward < 0.5 AND taskset = 'gsm8k'",
        todo=refused.todo,
    )
