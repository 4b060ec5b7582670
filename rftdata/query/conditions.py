"""Translation of the filters that DuckDB pushes into a scan, from Arrow expressions to conditions of PostgreSQL.

A condition never excludes a row that the filter keeps, and may keep more: what PostgreSQL cannot decide in the same way is left out,
and the scan applies the whole filter to the rows that it gets. Arrow expressions have no accessors, so they are read in their
serialized form: a record batch with the literals, whose metadata lists the nodes in prefix order.
"""

from __future__ import annotations

import ctypes
import datetime
import struct
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

_OPERATORS = {"equal": "=", "not_equal": "<>", "less": "<", "less_equal": "<=", "greater": ">", "greater_equal": ">="}
_PYTHON_TYPES: dict[str, type] = {
    "bigint": int,
    "integer": int,
    "smallint": int,
    "double precision": float,
    "boolean": bool,
    "text": str,
    "character varying": str,
    "USER-DEFINED": str,
    "timestamp with time zone": datetime.datetime,
}


@dataclass(frozen=True)
class Column:
    """A column by its name."""

    name: str


@dataclass(frozen=True)
class Literal:
    """A constant."""

    value: pa.Scalar


@dataclass(frozen=True)
class Call:
    """A function of Arrow with its arguments; `options` is a struct, or None."""

    function: str
    arguments: tuple[Node, ...]
    options: pa.Scalar | None


Node = Column | Literal | Call


def parse(expression: pc.Expression) -> Node | None:
    """Return an expression as a tree; None if it contains a node of another kind, such as a field of a struct."""
    _, (data,) = expression.__reduce__()
    batch = pa.ipc.open_file(data).get_batch(0)
    try:
        return _node(deque(_metadata(batch.schema)), batch)
    except _UnknownNodeError:
        return None


class _UnknownNodeError(Exception):
    pass


def _node(entries: deque[tuple[str, str]], batch: pa.RecordBatch) -> Node:
    """Remove the entries of one node from the left, and return it."""
    kind, value = entries.popleft()
    if kind == "field_ref":
        return Column(value)
    if kind == "literal":
        return Literal(batch.column(int(value))[0])
    if kind != "call":
        raise _UnknownNodeError(kind)
    arguments, options = [], None
    while entries[0][0] != "end":
        if entries[0][0] == "options":
            options = batch.column(int(entries.popleft()[1]))[0]
        else:
            arguments.append(_node(entries, batch))
    entries.popleft()
    return Call(value, tuple(arguments), options)


def _metadata(schema: pa.Schema) -> list[tuple[str, str]]:
    """Return the metadata of a schema with repeated keys, which pyarrow's dictionary loses, by Arrow's C data interface."""
    capsule = schema.__arrow_c_schema__()
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    # struct ArrowSchema begins with three pointers: format, name, metadata.
    address = (ctypes.c_void_p * 3).from_address(pointer_of(capsule, b"arrow_schema"))[2]
    if address is None:
        return []

    def number() -> int:
        nonlocal address
        (value,) = struct.unpack("=i", ctypes.string_at(address, 4))
        address += 4
        return int(value)

    def text() -> str:
        nonlocal address
        length = number()
        value = ctypes.string_at(address, length).decode()
        address += length
        return value

    return [(text(), text()) for _ in range(number())]


def columns_of(node: Node) -> set[str]:
    """Return the names of the columns in an expression."""
    if isinstance(node, Call):
        return set().union(*(columns_of(argument) for argument in node.arguments))
    return {node.name} if isinstance(node, Column) else set()


def condition(node: Node, kinds: Mapping[str, str]) -> sql.Composable | None:
    """Return a condition of PostgreSQL that is true wherever the filter is; None if nothing of it can be translated.

    Args:
        kinds: types of the columns that PostgreSQL has, as in `rftdata.query.catalogue.tables`.
    """
    if not isinstance(node, Call):
        return None
    arguments = node.arguments
    if node.function in ("and_kleene", "or_kleene"):
        sides = [side for side in (condition(argument, kinds) for argument in arguments) if side is not None]
        if len(sides) == 2:
            return sql.SQL("({} AND {})" if node.function == "and_kleene" else "({} OR {})").format(*sides)
        return sides[0] if sides and node.function == "and_kleene" else None
    if node.function == "if_else" and isinstance(arguments[2], Literal) and arguments[2].value.as_py() is None:
        return condition(arguments[1], kinds)  # NULL selects nothing
    if not arguments or not isinstance(arguments[0], Column) or arguments[0].name not in kinds:
        return None
    column, kind = sql.Identifier(arguments[0].name), kinds[arguments[0].name]
    if node.function == "is_valid":
        return sql.SQL("{} IS NOT NULL").format(column)
    if node.function == "is_null":
        if node.options is None or node.options["nan_is_null"].as_py():
            return None
        return sql.SQL("{} IS NULL").format(column)
    if node.function in _OPERATORS and isinstance(arguments[1], Literal):
        return _comparison(column, kind, _OPERATORS[node.function], arguments[1].value)
    if node.function == "is_in" and node.options is not None:
        return _membership(column, kind, node.options["value_set"])
    return None


def _comparison(column: sql.Identifier, kind: str, operator: str, literal: pa.Scalar) -> sql.Composable | None:
    value = _constant(literal, kind)
    if value is None:
        return None
    place: sql.Composable = sql.SQL("{}::text").format(column) if kind == "USER-DEFINED" else column
    if _PYTHON_TYPES[kind] is str and operator not in ("=", "<>"):
        place = sql.SQL('{} COLLATE "C"').format(place)  # DuckDB compares bytes
    return sql.SQL("{} {} {}").format(place, sql.SQL(operator), value)


def _membership(column: sql.Identifier, kind: str, values: pa.Scalar) -> sql.Composable | None:
    if not isinstance(values, pa.ListScalar) or not values.is_valid:
        return None
    sides = [_comparison(column, kind, "=", value) for value in values.values]
    conditions = [side for side in sides if side is not None]
    return (
        sql.SQL("({})").format(sql.SQL(" OR ").join(conditions))
        if conditions and len(conditions) == len(sides)
        else None
    )


def _constant(literal: pa.Scalar, kind: str) -> sql.Composable | None:
    """Return a constant for a comparison with a column; None if PostgreSQL may compare the two in another way."""
    expected = _PYTHON_TYPES.get(kind)
    try:
        value: Any = literal.as_py()
    except (ValueError, OverflowError):  # a time that Python cannot hold
        return None
    if expected is None or type(value) is not expected or (isinstance(value, str) and "\0" in value):
        return None
    if isinstance(value, datetime.datetime) and value.tzinfo is None:
        return None
    return sql.SQL("{}::float8").format(sql.Literal(value)) if expected is float else sql.Literal(value)
