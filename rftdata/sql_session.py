"""A person's SQL: statements as they were typed, and psql on the buffer. Names without a schema mean schema rft."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.errors import Diagnostic
from psycopg.rows import tuple_row

from rftdata.buffer import unique_names
from rftdata.postgres.database import Database, execute
from rftdata.postgres.programs import client_program, without_password
from rftdata.postgres.query_errors import query_error


@dataclass(frozen=True)
class StatementResult:
    """What a statement led to.

    Attributes:
        columns: names of the columns, each once, with those the query gave them; None for a command.
        message: the server's, such as `UPDATE 1`.
    """

    columns: dict[str, str] | None
    rows: list[dict[str, Any]]
    message: str | None


@dataclass(frozen=True)
class RewardChange:
    """What a statement did to rewards, and the command that undoes it."""

    what: str
    undo_command: str


@dataclass(frozen=True)
class SessionResult:
    """What statements led to, in their order, and what of it changed rewards."""

    statements: list[StatementResult]
    reward_changes: list[RewardChange]


def run_statements(database: Database, text: str, author: str) -> SessionResult:
    """Run one or more statements; labels that they write carry the author.

    Raises:
        QueryError: the server refused it; the message, detail and hint are the server's, whose error is the cause.
    """
    done = SessionResult([], [])

    def hear(notice: Diagnostic) -> None:
        if notice.message_hint and notice.message_hint.startswith("rft label undo "):
            done.reward_changes.append(RewardChange(notice.message_primary or "", notice.message_hint))

    with database.connection() as connection:
        execute(connection, "sql_settings", author=author)
        connection.add_notice_handler(hear)
        try:
            cursor = connection.cursor(row_factory=tuple_row)  # not dictionaries: two columns may have one name
            cursor.execute(text)
            more: bool | None = True
            while more:
                if cursor.description is None:
                    done.statements.append(StatementResult(None, [], cursor.statusmessage))
                else:
                    names = [column.name for column in cursor.description]
                    columns = dict(zip(unique_names(names), names, strict=True))
                    rows = [dict(zip(columns, row, strict=True)) for row in cursor.fetchall()]
                    done.statements.append(StatementResult(columns, rows, cursor.statusmessage))
                more = cursor.nextset()
        except (psycopg.DataError, psycopg.ProgrammingError, psycopg.IntegrityError, psycopg.InternalError) as error:
            raise query_error(error) from error
        finally:
            connection.remove_notice_handler(hear)
    return done


def psql_command(database: Database, author: str) -> tuple[str, list[str], dict[str, str]]:
    """Program, arguments and environment of psql on the buffer; the password travels in the environment only."""
    address, password = without_password(database.uri)
    quoted = author.replace("\\", "\\\\").replace(" ", "\\ ")
    options = f"-c search_path=rft,public -c rft.author={quoted} " + os.environ.get("PGOPTIONS", "")
    environment = {**os.environ, **password, "PGAPPNAME": "rft sql", "PGOPTIONS": options}
    return client_program("psql"), ["psql", address], environment
