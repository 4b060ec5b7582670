"""DuckDB without external access, in which the SQL of a configuration file runs.

No files, no network, no extensions, no settings, no Python variables, one thread, limited memory. A query can read only the Arrow tables
registered for it, and files that were allowed by name.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from rftdata.errors import PluginError

MEMORY_LIMIT = "2GB"
"""Memory that one query may use in addition to its Arrow tables."""

SETTINGS: dict[str, str | bool | int | float | list[str]] = {
    "threads": "1",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "python_enable_replacements": "false",
    "memory_limit": MEMORY_LIMIT,
    # Queries that exceed memory fail; nothing is written to disk.
    "temp_directory": "",
    "max_temp_directory_size": "0B",
    "secret_directory": "/nonexistent",
}


def open_sandbox(allowed: Sequence[Path] = (), *, network: bool = False) -> duckdb.DuckDBPyConnection:
    """Open a connection to an empty database in memory.

    Args:
        allowed: files that queries may read, and folders in which they may read everything.
        network: whether they may read http(s) and s3 addresses, by DuckDB's extension httpfs.

    Raises:
        PluginError: the extension is not installed. It is never installed from here.
    """
    connection = duckdb.connect(":memory:", config=SETTINGS)
    # Timestamps as text are the same on every machine. The extension is part of DuckDB's package.
    connection.execute("LOAD icu")
    connection.execute("SET GLOBAL TimeZone = 'UTC'")  # of its cursors, too
    folders = [f"{path}/" for path in allowed if path.is_dir()]
    if network:
        try:
            connection.execute("LOAD httpfs")
        except duckdb.Error as error:
            raise PluginError(
                f"DuckDB's extension httpfs does not load: {message(error)}",
                todo="install it once: duckdb -c 'INSTALL httpfs'",
            ) from error
        folders += ["http://", "https://", "s3://"]
    if allowed or network:
        _set_list(connection, "allowed_paths", [str(path) for path in allowed if not path.is_dir()])
        _set_list(connection, "allowed_directories", folders)
    # External access is disabled after connecting, because DuckDB uses it even to open ":memory:".
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")
    return connection


def check_sandbox() -> duckdb.DuckDBPyConnection:
    """Open a connection to the sandbox that all checks of this process share, which saves 20 ms each; for queries over no rows.

    A check leaves nothing behind: a query can only read, and tables are registered for one connection.
    """
    return _sandbox_of(os.getpid()).cursor()


@cache
def _sandbox_of(pid: int) -> duckdb.DuckDBPyConnection:
    # A forked process must not use the connection of its parent.
    return open_sandbox()


def _set_list(connection: duckdb.DuckDBPyConnection, name: str, values: Sequence[str]) -> None:
    # SET takes no parameters.
    texts = ", ".join("'" + value.replace("'", "''") + "'" for value in values)
    connection.execute(f"SET {name} = [{texts}]")


@contextlib.contextmanager
def registered(connection: duckdb.DuckDBPyConnection, tables: Mapping[str, pa.Table]) -> Iterator[None]:
    """Make `tables` available to queries by their names."""
    for name, table in tables.items():
        connection.register(name, table)
    try:
        yield
    finally:
        for name in tables:
            connection.unregister(name)


def message(error: duckdb.Error) -> str:
    """Return DuckDB's message without the excerpt of the query."""
    return " ".join(str(error).split("\n\nLINE ")[0].split())


def quoted(name: str) -> str:
    """Quote a column's name for a query."""
    return '"' + name.replace('"', '""') + '"'


TIME_WORDS = frozenset({"current_date", "current_time", "current_timestamp", "localtime", "localtimestamp"})
"""Functions without parentheses, unless a column has the name."""
SEEDED = frozenset({"random", "uuid", "gen_random_uuid", "uuidv4"})
"""Functions that are repeatable after `setseed`."""
_MACROS = frozenset({"ago", "pg_conf_load_time", "pg_postmaster_start_time"})
_HIDING = frozenset({"query", "query_table", "json_execute_serialized_sql"})
"""Functions that run a text, which cannot be inspected in advance."""


def is_changing(function: Mapping[str, Any]) -> bool:
    """Return whether a function, as a node of DuckDB's tree, gives another value every time."""
    name = str(function["function_name"]).lower()
    if name in _HIDING or name.startswith(("duckdb_", "pragma_")):
        return True
    # age(x) counts from now, age(x, y) does not.
    return name in changing_functions() or (name == "age" and len(function["arguments"]) == 1)


@cache
def changing_functions() -> frozenset[str]:
    """Return the names of functions whose result depends on more than their arguments: random numbers, the time, settings."""
    with check_sandbox() as connection:
        rows = connection.execute(
            "SELECT DISTINCT function_name FROM duckdb_functions() WHERE stability <> 'CONSISTENT' AND function_name <> 'error'"
        ).fetchall()
    return frozenset(name for (name,) in rows) | TIME_WORDS | _MACROS


@cache
def aggregate_functions() -> frozenset[str]:
    """Return the names of functions that combine many rows into one value."""
    with check_sandbox() as connection:
        rows = connection.execute(
            "SELECT DISTINCT function_name FROM duckdb_functions() WHERE function_type = 'aggregate'"
        ).fetchall()
    return frozenset(name for (name,) in rows)
