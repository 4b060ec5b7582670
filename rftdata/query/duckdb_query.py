"""One query by DuckDB over a buffer: its tables are registered by their names, and the result is streamed.

The query reads those tables and nothing else: no files, no network, no extensions, no settings, no variables of Python.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise

import duckdb
import pyarrow as pa

from rftdata.archives.files import ArchiveFolder
from rftdata.errors import QueryError, RftError
from rftdata.limits import check_text
from rftdata.postgres.database import Database, sql_folder
from rftdata.postgres.driver_errors import translated
from rftdata.query.arrays import BASE_ARRAYS, OPTIONAL_ARRAYS, ArrayColumns, OnDamage
from rftdata.query.catalogue import tables
from rftdata.query.scan import Reading, Table
from rftdata.segments.base import SegmentStore
from rftdata.segments.reader import SegmentReader

_ROWS_AT_ONCE = 8192
# Segments kept open: those of a few batches of rows.
_OPEN_SEGMENTS = 64
_READING = (
    duckdb.StatementType.SELECT,
    duckdb.StatementType.EXPLAIN,
    duckdb.StatementType.MULTI,
)  # PIVOT is of the third type
# One row per turn; it reads arrays that other queries need not have.
_TURN_VIEW = "turn"
_VIEWS = (_TURN_VIEW, "reward_part")
_SETTINGS: dict[str, str | bool | int | float | list[str]] = {
    "python_enable_replacements": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
}


def run_query(
    database: Database,
    store: SegmentStore,
    archives: ArchiveFolder,
    text: str,
    *,
    run_id: int | None = None,
    limit_bytes: int | None = None,
    on_damage: OnDamage | None = None,
) -> pa.RecordBatchReader:
    """Return the result of a DuckDB query; arguments and errors as in `Buffer.query`."""
    arrays = ArrayColumns(SegmentReader(database, store, max_segments=_OPEN_SEGMENTS), on_damage)
    batches = _stream(database, Reading(database, arrays, archives, limit_bytes), text, run_id)
    # The first batches are computed here, so that a query that is refused raises at the call.
    first = next(batches)
    assert isinstance(first, pa.Schema)
    return pa.RecordBatchReader.from_batches(first, batches)


def _stream(
    database: Database, reading: Reading, text: str, run_id: int | None
) -> Iterator[pa.RecordBatch | pa.Schema]:
    """Yield the schema of the result and its batches."""
    with ExitStack() as resources:
        resources.enter_context(translated(database.uri))
        resources.callback(reading.close)
        connection = resources.enter_context(duckdb.connect(config=_SETTINGS))
        try:
            _register(connection, database, reading, text, run_id)
            result = connection.sql(text)
            if result is None:
                raise QueryError(
                    "the statement returns no rows",
                    value=text,
                    todo="write a SELECT; use `rft sql` to change rewards and tasks",
                )
            reader = result.to_arrow_reader(_ROWS_AT_ONCE)
            yield reader.schema
            yield from reader
        except RftError:
            raise
        except Exception as error:
            if reading.error is not None:  # DuckDB reports an error of a scan as one of its own
                raise reading.error from None
            if not isinstance(error, duckdb.Error):
                raise
            raise _refused(error) from error


def _register(
    connection: duckdb.DuckDBPyConnection, database: Database, reading: Reading, text: str, run_id: int | None
) -> None:
    check_text("the text of the query", text)
    statements = connection.extract_statements(text)
    if len(statements) != 1:
        raise QueryError("a query is one statement", value=text, todo="join them with WITH, or run it again for each")
    if statements[0].type not in _READING:
        raise QueryError(
            "a query only reads",
            value=text,
            allowed="SELECT, FROM, DESCRIBE, SUMMARIZE, SHOW, EXPLAIN",
            todo="write a SELECT; use `rft sql` to change rewards and tasks, and `rft export` to write files",
        )
    connection.execute("SET enable_progress_bar = false")  # DuckDB writes it to the standard output
    connection.execute("CREATE SCHEMA rft")
    by_name, named = tables(database), _identifiers(text)
    arrays = [*BASE_ARRAYS, *(array for array in OPTIONAL_ARRAYS if array in named or _TURN_VIEW in named)]
    for name, columns in by_name.items():
        table = Table(name, columns, reading)
        if name == "experience":
            view = by_name["v_experience"]
            same = {column: kind for column, kind in columns.items() if view.get(column) == kind}
            table = Table(name, view, reading, arrays=arrays, run_id=run_id, direct=(name, same))
        connection.register(name, table)
        connection.execute(f'CREATE VIEW rft."{name}" AS FROM memory.main."{name}"')
    for name in _VIEWS:
        if name in named:
            connection.execute((sql_folder() / "duckdb" / f"{name}.sql").read_text(encoding="utf-8"))
    # After everything that a query needs is loaded; the extension with time zones is part of DuckDB's package.
    connection.execute("LOAD icu")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


def _identifiers(text: str) -> set[str]:
    """Return the identifiers in a query, by DuckDB's own lexer."""
    tokens = [*duckdb.tokenize(text), (len(text.encode()), None)]
    data = text.encode()
    words = (
        data[start:end].decode(errors="replace")
        for (start, kind), (end, _) in pairwise(tokens)
        if kind == duckdb.token_type.identifier
    )
    return {word.strip().strip('"').lower() for word in words}


def _refused(error: duckdb.Error) -> QueryError:
    message = " ".join(str(error).split("\n\nLINE")[0].split())
    names = "tables are those of schema rft: experience, run, draw, verdict, task, evaluation, …"
    return QueryError(
        f"DuckDB rejected the query: {message}", todo=f'{names}; `rft query "describe experience"` lists columns'
    )
