"""A formula on the columns of a batch, for stages with a formula argument: `reward + 0.1 * metrics.quality`.

The language is DuckDB's expressions: arithmetic, comparisons, CASE, `coalesce`, `least`, `greatest`, text functions, and
window functions over the batch (`reward - avg(reward) OVER (PARTITION BY group_id)`). It runs in the sandbox of
`operators.sql.sandbox`, without subqueries, files, and functions that change from call to call (`random`, `now`).

A point selects a key of a JSON column. In `metrics`, `reward_parts` and `features` the value is a number (true is 1, false is 0), in
`metadata` and `reviews` a text (`metadata.level::INT`). A missing key, or a value of another kind, is null. Names with characters
other than letters are quoted: `metrics."reward/accuracy"`. The column without a point is its JSON text.

Null yields null, as in SQL: `reward + metrics.quality` is null where the metric is missing, and each stage defines what it does with a
null. `coalesce(metrics.quality, 0)` replaces it within the formula. Division by zero is infinite with `/` and null with `//` and `%`.
NaN is greater than every number and equal to itself.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from operators.sql.sandbox import (
    aggregate_functions,
    check_sandbox,
    is_changing,
    message,
    open_sandbox,
    quoted,
    registered,
)
from rftdata.errors import ConfigError, OperatorError
from rftdata.user_code.time_limits import interruptible

NUMBER_COLUMNS = frozenset({"metrics", "reward_parts", "features"})
TEXT_COLUMNS = frozenset({"metadata", "reviews"})

_ROW = "__row__"
_WORDS = {pa.float64(): "a number", pa.bool_(): "a condition (true or false)", pa.string(): "a text"}
_LANGUAGE = "a DuckDB expression over the columns, such as reward + 0.1 * metrics.quality"


class Expression:
    """A parsed formula.

    Attributes:
        text: as written.
        type: type of its values; None until `bind` determines it.
        columns: columns of the batch that it needs.
        rowwise: every row's value depends on that row alone (no window function).
    """

    def __init__(self, text: str, type: pa.DataType | None = None) -> None:
        """Parse a formula.

        Args:
            type: required type of its values: `pa.float64()`, `pa.bool_()`, `pa.string()`; None accepts any.

        Raises:
            ConfigError: it is not an expression, or not an allowed one.
        """
        self.text = text.strip()
        self.type = type
        references = _References()
        with check_sandbox() as connection:
            tree = _parse(connection, self.text)
            selected = tree["statements"][0]["node"]["select_list"]
            selected[0] = references.visit(selected[0], frozenset())
            select = _written(connection, tree)
        self.rowwise = not references.has_window
        self.columns = frozenset(references.columns)
        self._query = _query(select, references, None if self.rowwise else _ROW)
        # A plain column needs no query.
        alone = (
            selected[0]["class"] == "COLUMN_REF" and len(selected[0]["column_names"]) == 1 and not references.members
        )
        self._column: str | None = selected[0]["column_names"][0] if alone else None
        self._lock = threading.Lock()
        self._connection: duckdb.DuckDBPyConnection | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"text": self.text, "type": self.type}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["text"], state["type"])  # type: ignore[misc]

    def bind(self, schema: pa.Schema) -> pa.DataType:
        """Check the formula against the columns of a batch; return the type of its values.

        Raises:
            ConfigError: a column does not exist, or the values have another type than required.
        """
        allowed = ", ".join(schema.names)
        missing = sorted(self.columns - set(schema.names))
        if missing:
            raise ConfigError(
                f"{self.text!r} reads the column {missing[0]!r}, which the batch does not have", allowed=allowed
            )
        try:
            with check_sandbox() as connection:
                actual = self._run(connection, schema.empty_table()).type
        except duckdb.Error as error:
            raise ConfigError(
                f"DuckDB refuses {self.text!r}: {message(error)}", allowed=f"columns: {allowed}"
            ) from error
        if self.type is None:
            # To DuckDB sums and literals with a decimal point are decimals of various widths.
            self.type = pa.float64() if pa.types.is_decimal(actual) else actual
        elif not _casts(actual, self.type):
            words = _WORDS.get(self.type, str(self.type))
            raise ConfigError(f"{self.text!r} is not {words}", value=str(actual), allowed=words)
        return self.type

    def evaluate(self, table: pa.Table) -> pa.Array:
        """Return one value for each row of a batch. Thread-safe.

        Raises:
            OperatorError: the formula cannot be evaluated, for example on a text that is not a number.
        """
        if self._column is not None and self.type is not None:
            values = table[self._column]
            return (values.chunk(0) if values.num_chunks == 1 else values.combine_chunks()).cast(self.type)
        with self._lock:
            if self._connection is None:
                self._connection = open_sandbox()
            cursor = self._connection.cursor()
        try:
            with contextlib.closing(cursor):
                values = self._run(cursor, table)
        except duckdb.Error as error:
            raise OperatorError(f"DuckDB cannot evaluate {self.text!r}: {message(error)}") from error
        return values if self.type is None else values.cast(self.type)

    def close(self) -> None:
        """Close the connection; the next `evaluate` opens another."""
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _run(self, connection: duckdb.DuckDBPyConnection, table: pa.Table) -> pa.Array:
        columns = table.select([name for name in table.column_names if name in self.columns])
        if not self.columns or not self.rowwise:
            # A window returns rows in its own order, and without any column the number of rows would be lost.
            columns = columns.append_column(_ROW, pa.array(np.arange(table.num_rows)))
        with registered(connection, {"batch": columns}), interruptible(connection.interrupt):
            result = connection.sql(self._query).to_arrow_table().combine_chunks()
        values = result["value"]
        if not self.rowwise:
            values = values.take(pa.array(np.argsort(result[_ROW].to_numpy(), kind="stable")))
        return values.chunk(0) if values.num_chunks else pa.array([], values.type)


class _References:
    """Walks the tree of an expression: collects what it reads, refuses what is not allowed, and turns members into columns."""

    def __init__(self) -> None:
        self.columns: set[str] = set()
        self.members: dict[str, tuple[str, str]] = {}
        self.has_window = False

    def visit(self, node: Any, bound: frozenset[str]) -> Any:
        """Return the node as it will run. `bound`: parameters of enclosing lambdas, which are not columns."""
        if isinstance(node, list):
            return [self.visit(child, bound) for child in node]
        if not isinstance(node, dict):
            return node
        kind = node.get("class")
        if kind == "COLUMN_REF":
            return self._reference(node, bound)
        if kind in _REFUSED:
            raise ConfigError(f"{_REFUSED[kind]} cannot be used in an expression", allowed=_LANGUAGE)
        if kind in ("FUNCTION", "WINDOW"):
            self._function(node, kind)
        if kind == "LAMBDA":
            bound = bound | set(_names(node["lhs"]))
        visited = {key: self.visit(child, bound) for key, child in node.items()}
        return _null_by_zero(visited) if kind == "FUNCTION" else visited

    def _function(self, node: dict[str, Any], kind: str) -> None:
        name = str(node["function_name"]).lower()
        if is_changing(node):
            raise ConfigError(
                f"{name}() gives another value every time",
                todo="use columns only, so that the same row always gives the same value",
            )
        if name in _ROW_MAKING:
            raise ConfigError(f"{name}() makes several rows from one", allowed=_LANGUAGE)
        if kind == "WINDOW":
            self.has_window = True
        elif name in aggregate_functions() and not node.get("is_operator"):
            raise ConfigError(
                f"{name}() is an aggregate and needs a window", todo=f"write {name}(…) OVER (PARTITION BY group_id)"
            )

    def _reference(self, node: dict[str, Any], bound: frozenset[str]) -> dict[str, Any]:
        path = [str(name) for name in node["column_names"]]
        if path[0] in bound:
            return node
        if path[0] == "batch" and len(path) > 1:
            path = path[1:]
        self.columns.add(path[0])
        if path[0] in NUMBER_COLUMNS | TEXT_COLUMNS and len(path) > 1:
            name = ".".join(path[1:])
            if '"' in name:
                raise ConfigError(f"a name in {path[0]} cannot contain a quotation mark", value=name)
            path = [f"{path[0]}.{name}"]
            self.members[path[0]] = (path[0].partition(".")[0], name)
        return {**node, "column_names": path}


_ROW_MAKING = frozenset({"unnest", "unlist", "generate_subscripts"})
_RAISING_BY_ZERO = frozenset({"//", "divide", "%", "mod"})
_REFUSED = {
    "SUBQUERY": "a subquery",
    "STAR": "*",
    "PARAMETER": "a parameter",
    "POSITIONAL_REFERENCE": "the number of a column",
    "DEFAULT": "DEFAULT",
}


def _null_by_zero(node: dict[str, Any]) -> dict[str, Any]:
    """Rewrite x // y as x // nullif(y, 0), so that a division by zero yields a row without a value instead of a failed batch."""
    if str(node["function_name"]).lower() not in _RAISING_BY_ZERO or len(node["arguments"]) != 2:
        return node
    zero = {"class": "CONSTANT", "type": "VALUE_CONSTANT", "alias": "", "literal": {"kind": "INTEGER", "text": "0"}}
    dividend, divisor = node["arguments"]
    name = {"function_name": "nullif", "qualified_name": {"path": ["nullif"]}, "is_operator": False, "alias": ""}
    null_if_zero = {**node, **name, "arguments": [divisor, {"name": "", "expression": zero}]}
    return {**node, "arguments": [dividend, {"name": "", "expression": null_if_zero}]}


def _names(node: Any) -> Iterator[str]:
    if isinstance(node, list):
        for child in node:
            yield from _names(child)
    elif isinstance(node, dict):
        if node.get("class") == "COLUMN_REF":
            yield node["column_names"][0]
        for child in node.values():
            yield from _names(child)


def _parse(connection: duckdb.DuckDBPyConnection, text: str) -> dict[str, Any]:
    """Return DuckDB's tree of `SELECT (text) FROM batch`."""
    query = duckdb.ConstantExpression(f"SELECT ({text}\n) AS value FROM batch")
    tree: dict[str, Any] = json.loads(_called(connection, "json_serialize_sql", query))
    if tree.get("error") or not text:
        raise ConfigError(
            f"this is not an expression: {tree.get('error_message', 'it is empty')}", value=text, allowed=_LANGUAGE
        )
    node = tree["statements"][0]["node"]
    # A closing parenthesis in the text could introduce more than one expression.
    if len(tree["statements"]) != 1 or node["type"] != "SELECT_NODE" or len(node["select_list"]) != 1:
        raise ConfigError("this is more than one expression", value=text, allowed=_LANGUAGE)
    clauses = ("where_clause", "qualify", "having", "group_expressions", "sample", "modifiers")
    if node["from_table"].get("table_name") != "batch" or any(node[clause] for clause in clauses):
        raise ConfigError("this is more than an expression", value=text, allowed=_LANGUAGE)
    return tree


def _written(connection: duckdb.DuckDBPyConnection, tree: dict[str, Any]) -> str:
    """Convert the tree back to the text `SELECT … AS value`."""
    serialized = duckdb.ConstantExpression(json.dumps(tree)).cast("JSON")
    return _called(connection, "json_deserialize_sql", serialized).removesuffix(" FROM batch")


def _called(connection: duckdb.DuckDBPyConnection, function: str, argument: duckdb.Expression) -> str:
    """Return the result of a DuckDB function."""
    return str(connection.values((duckdb.FunctionExpression(function, argument),)).fetchall()[0][0])


def _query(select: str, references: _References, row: str | None) -> str:
    """Return the expression as a query over the batch in which members of JSON columns are separate columns."""
    members = [f"{_extract(column, name)} AS {quoted(key)}" for key, (column, name) in references.members.items()]
    selected = ", ".join([*(quoted(name) for name in sorted(references.columns)), *members, *([row] if row else [])])
    return f"{select}{', ' + row if row else ''} FROM (SELECT {selected or _ROW} FROM batch)"


def _extract(column: str, name: str) -> str:
    place = "'$.\"" + name.replace("'", "''") + "\"'"
    if column in NUMBER_COLUMNS:
        # A text is not a number, whatever it contains. DuckDB extracts once.
        value = f"json_extract({column}, {place})"
        return f"CASE WHEN NOT starts_with({value}::VARCHAR, '\"') THEN TRY_CAST({value} AS DOUBLE) END"
    return f"json_extract_string({column}, {place})"


def _casts(actual: pa.DataType, wanted: pa.DataType) -> bool:
    if actual == wanted or pa.types.is_null(actual):
        return True
    kinds = pa.types
    number = (
        kinds.is_integer(actual) or kinds.is_floating(actual) or kinds.is_decimal(actual) or kinds.is_boolean(actual)
    )
    return bool(kinds.is_floating(wanted) and number)
