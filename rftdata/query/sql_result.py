"""The result of a statement in PostgreSQL's SQL as an Arrow table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import psycopg
import pyarrow as pa
from psycopg.rows import tuple_row

from rftdata.postgres.database import Database
from rftdata.postgres.query_errors import query_error


def sql_result(database: Database, query: str, parameters: Sequence[Any] | dict[str, Any] | None) -> pa.Table:
    """Run a statement; arguments, result and errors as in `Buffer.sql`."""
    with database.connection() as connection:
        cursor = connection.cursor(row_factory=tuple_row)  # not dictionaries, because two columns may have one name
        try:
            cursor.execute(query, parameters)
        except psycopg.OperationalError:
            raise
        except psycopg.DatabaseError as error:
            raise query_error(error) from error
        if cursor.description is None:
            return pa.table({})
        names = unique_names([column.name for column in cursor.description])
        rows = cursor.fetchall()
    return pa.table([_column([row[i] for row in rows]) for i in range(len(names))], names=names)


def unique_names(names: Sequence[str]) -> list[str]:
    """Return unique names of columns: the second of two columns `id` becomes `id_2`."""
    taken, unique = set(names), []
    for i, name in enumerate(names):
        number = names[:i].count(name) + 1
        while number > 1 and f"{name}_{number}" in taken:
            number += 1
        unique.append(name if number == 1 else f"{name}_{number}")
        taken.add(unique[-1])
    return unique


def _column(values: list[Any]) -> pa.Array:
    # Arrow takes nine times as long to find out that texts are texts.
    first = next((value for value in values if value is not None), None)
    try:
        return pa.array(values, pa.string() if isinstance(first, str) else None)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError):
        # Mixed JSON, numbers beyond 64 bits and similar values are returned as text.
        return pa.array(
            [None if v is None else v if isinstance(v, str) else json.dumps(v, default=str) for v in values]
        )
