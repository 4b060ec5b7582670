"""Reading of rows into Arrow with COPY: the server writes CSV, and Arrow parses it in C++.

Every value is exact: floats are written with the shortest digits that give the same number, an empty text differs from NULL by its
quotes, and times are read as microseconds. Column types are those of `Buffer.sql`: integers are int64, enums and jsonb are text.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.csv as pacsv
from psycopg import sql
from psycopg.rows import tuple_row

from rftdata.postgres.database import Connection

# Rows are parsed together up to this many bytes of CSV, or this many rows.
_BLOCK_BYTES, _BLOCK_ROWS = 4 * 2**20, 16_384
_TIME = pa.timestamp("us", tz="UTC")
_ELEMENTS = {
    "int2": pa.int64(),
    "int4": pa.int64(),
    "int8": pa.int64(),
    "float4": pa.float64(),
    "float8": pa.float64(),
    "bool": pa.bool_(),
}
_TYPES = {
    "bigint": pa.int64(),
    "integer": pa.int64(),
    "smallint": pa.int64(),
    "double precision": pa.float64(),
    "real": pa.float64(),
    "boolean": pa.bool_(),
    "timestamp with time zone": _TIME,
    "bytea": pa.binary(),
    "uuid": pa.uuid(),
}


def arrow_type(kind: str) -> pa.DataType:
    """Return the Arrow type of a column of PostgreSQL, by its type in `rftdata.query.catalogue.tables`; text if Arrow has no other."""
    if kind.endswith("[]"):
        return pa.list_(_ELEMENTS.get(kind[:-2], pa.string()))
    return _TYPES.get(kind, pa.string())


def copy_batches(
    connection: Connection,
    source: sql.Composable,
    columns: Mapping[str, str],
    where: sql.Composable | None = None,
    *,
    order: sql.Composable | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a table as record batches.

    Args:
        source: the table or view.
        columns: names and types, as in `rftdata.query.catalogue.tables`; at least one.
        where: condition, without parameters.
        order: sort order of the rows; None for the server's.
    """
    written = sql.SQL(", ").join(_written(name, kind) for name, kind in columns.items())
    query = sql.SQL("SELECT {} FROM {}").format(written, source)
    if where is not None:
        query = sql.SQL("{} WHERE {}").format(query, where)
    if order is not None:
        query = sql.SQL("{} ORDER BY {}").format(query, order)
    statement = sql.SQL("COPY ({}) TO STDOUT (FORMAT CSV)").format(query)
    with connection.cursor(row_factory=tuple_row) as cursor, cursor.copy(statement) as copy:
        lines: list[Any] = []
        size = 0
        for line in copy:
            lines.append(line)
            size += len(line)
            if size >= _BLOCK_BYTES or len(lines) >= _BLOCK_ROWS:
                data, lines, size = b"".join(lines), [], 0
                yield _parsed(data, columns)
        if lines:
            yield _parsed(b"".join(lines), columns)


def _written(name: str, kind: str) -> sql.Composable:
    """Return what the server writes of a column."""
    column = sql.Identifier(name)
    if kind == "timestamp with time zone":
        return sql.SQL("(extract(epoch FROM {}) * 1000000)::bigint").format(column)
    if kind == "bytea":
        return sql.SQL("encode({}, 'hex')").format(column)
    if kind.endswith("[]"):
        return sql.SQL("to_json({})").format(column)
    return column


def _parsed(data: bytes, columns: Mapping[str, str]) -> pa.RecordBatch:
    names = list(columns)
    plain = {name: _plain(kind) for name, kind in columns.items()}
    table = pacsv.read_csv(
        pa.BufferReader(data),
        # One block, because a block must hold whole rows, and a row may be of any length.
        read_options=pacsv.ReadOptions(column_names=names, block_size=len(data) + 1, use_threads=False),
        parse_options=pacsv.ParseOptions(newlines_in_values=True, ignore_empty_lines=False),
        convert_options=pacsv.ConvertOptions(
            column_types=plain,
            null_values=[""],
            true_values=["t"],
            false_values=["f"],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        ),
    )
    arrays = [_converted(table.column(i).combine_chunks(), arrow_type(kind)) for i, kind in enumerate(columns.values())]
    return pa.RecordBatch.from_arrays(arrays, names=names)


def _plain(kind: str) -> pa.DataType:
    """Return the type that a column has while it is parsed."""
    arrow = arrow_type(kind)
    if arrow == _TIME:
        return pa.int64()
    return arrow if pa.types.is_primitive(arrow) else pa.string()


def _converted(array: pa.Array, kind: pa.DataType) -> pa.Array:
    if array.type == kind:
        return array
    if kind == _TIME:
        return array.cast(kind)
    texts = array.to_pylist()
    if kind == pa.binary():
        return pa.array([None if text is None else bytes.fromhex(text) for text in texts], kind)
    if kind == pa.uuid():
        return pa.array([None if text is None else uuid.UUID(text).bytes for text in texts], kind)
    return pa.array([None if text is None else _elements(json.loads(text), kind) for text in texts], kind)


def _elements(values: list[Any], kind: pa.ListType) -> list[Any]:
    """Return the elements of a list; JSON has NaN and infinities as text."""
    if kind.value_type == pa.float64():
        return [None if value is None else float(value) for value in values]
    return values
