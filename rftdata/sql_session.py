"""SQL typed by a person: statements, and psql on the buffer. Names without a schema refer to schema rft."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.errors import Diagnostic
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from rftdata.errors import QueryError
from rftdata.postgres.database import Database, execute
from rftdata.postgres.programs import client_program, without_password
from rftdata.postgres.query_errors import query_error
from rftdata.query.sql_result import unique_names


@dataclass(frozen=True)
class StatementResult:
    """The result of a statement.

    Attributes:
        columns: unique names of the columns, with the names in the query; None for a command.
        message: the server's, such as `UPDATE 1`.
    """

    columns: dict[str, str] | None
    rows: list[dict[str, Any]]
    message: str | None


@dataclass(frozen=True)
class RewardChange:
    """A change of rewards by a statement, and the command that undoes it."""

    what: str
    undo_command: str


@dataclass(frozen=True)
class SessionResult:
    """The results of statements, in order, and their changes of rewards."""

    statements: list[StatementResult]
    reward_changes: list[RewardChange]


def run_statements(database: Database, text: str, author: str) -> SessionResult:
    """Run statements; labels that they write have this author.

    Raises:
        QueryError: the server rejected a statement; the message, detail and hint are the server's, whose error is the cause.
        QueryError: the statements began a transaction and did not end it; it is rolled back.
    """
    done = SessionResult([], [])

    def record(notice: Diagnostic) -> None:
        if notice.message_hint and notice.message_hint.startswith("rft label undo "):
            done.reward_changes.append(RewardChange(notice.message_primary or "", notice.message_hint))

    with database.connection() as connection:
        execute(connection, "sql_settings", author=author)
        connection.add_notice_handler(record)
        try:
            cursor = connection.cursor(row_factory=tuple_row)  # not dictionaries, because two columns may have one name
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
            if connection.info.transaction_status != TransactionStatus.IDLE:
                raise QueryError(
                    "the statements began a transaction without ending it, and nothing of it was kept",
                    todo="add COMMIT",
                )
        except (psycopg.DataError, psycopg.ProgrammingError, psycopg.IntegrityError, psycopg.InternalError) as error:
            raise query_error(error) from error
        finally:
            # The next user of the pool must not get the author and other settings of these statements.
            connection.close()
    return done


def psql_command(database: Database, author: str) -> tuple[str, list[str], dict[str, str]]:
    """Return program, arguments and environment of psql on the buffer; the password is passed only in the environment."""
    address, password = without_password(database.uri)
    quoted = author.replace("\\", "\\\\").replace(" ", "\\ ")
    options = f"-c search_path=rft,public -c rft.author={quoted} " + os.environ.get("PGOPTIONS", "")
    environment = {**os.environ, **password, "PGAPPNAME": "rft sql", "PGOPTIONS": options}
    return client_program("psql"), ["psql", address], environment
