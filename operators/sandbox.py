"""DuckDB with no way out: where the SQL of a configuration file runs.

No files, no network, no extensions, no settings, no Python variables, one thread. What a query may look at is what was
registered for it, as Arrow.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

import duckdb
import pyarrow as pa

SETTINGS: dict[str, str | bool | int | float | list[str]] = {
    "threads": "1",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "python_enable_replacements": "false",
}


def open_sandbox(files: Sequence[str] = (), folders: Sequence[str] = ()) -> duckdb.DuckDBPyConnection:
    """A connection to an empty database in memory.

    Args:
        files: absolute paths that queries may read.
        folders: absolute paths that they may read anything below.
    """
    connection = duckdb.connect(":memory:", config=SETTINGS)
    connection.execute("SET allowed_paths = ?", [list(files)])
    connection.execute("SET allowed_directories = ?", [list(folders)])
    # External access is closed after connecting: DuckDB opens even ":memory:" through it.
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")
    return connection


@contextlib.contextmanager
def registered(connection: duckdb.DuckDBPyConnection, tables: Mapping[str, pa.Table]) -> Iterator[None]:
    """`tables` can be queried by their names within."""
    for name, table in tables.items():
        connection.register(name, table)
    try:
        yield
    finally:
        for name in tables:
            connection.unregister(name)


def message(error: duckdb.Error) -> str:
    """DuckDB's message without its picture of the line."""
    return " ".join(str(error).split("\n\nLINE ")[0].split())


@cache
def changing_functions() -> frozenset[str]:
    """Names of functions whose answer depends on more than their arguments: random numbers, the time, settings."""
    with contextlib.closing(open_sandbox()) as connection:
        rows = connection.execute(
            "SELECT DISTINCT function_name FROM duckdb_functions() WHERE stability <> 'CONSISTENT' AND function_name <> 'error'"
        ).fetchall()
    return frozenset(name for (name,) in rows) | {"current_time", "current_timestamp", "localtime", "localtimestamp"}


@cache
def aggregate_functions() -> frozenset[str]:
    """Names of functions that make one value of many rows."""
    with contextlib.closing(open_sandbox()) as connection:
        rows = connection.execute(
            "SELECT DISTINCT function_name FROM duckdb_functions() WHERE function_type = 'aggregate'"
        ).fetchall()
    return frozenset(name for (name,) in rows)
