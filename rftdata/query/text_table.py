"""A query that a person writes, as a table of texts.

The query stands inside a SELECT of ours, so that PostgreSQL accepts one statement that reads and nothing else. Values are cut on the server: neither many
rows nor long values fill the memory of the process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from psycopg import sql
from psycopg.rows import tuple_row

from rftdata.errors import QueryError
from rftdata.postgres.database import Connection
from rftdata.postgres.written_text import check_complete, in_parentheses

MAX_ROWS = 1000
_MOST_CHARACTERS = 20_000_000  # of a result
_NUMBERS = frozenset({20, 21, 23, 26, 700, 701, 1700})  # ids of types


@dataclass(frozen=True)
class TextTable:
    """The result of a query.

    Attributes:
        columns: names, and whether a column has numbers.
        is_cut: whether there are more rows.
        cell_length: characters after which values are cut.
    """

    columns: list[tuple[str, bool]]
    rows: list[tuple[str | None, ...]]
    is_cut: bool
    cell_length: int


def run_query(connection: Connection, text: str) -> TextTable:
    """Return the rows of a query, in a transaction that only reads.

    Raises:
        QueryError: it is not one query.
        psycopg.Error: the database rejected it.
    """
    query = text.strip().rstrip(";").strip()
    if not query:
        raise QueryError(
            "the query is empty", todo="write one SELECT, such as: SELECT run, count(*) FROM v_experience GROUP BY run"
        )
    check_complete(connection, query, "{}")
    inner = in_parentheses(query)
    with connection.cursor(row_factory=tuple_row, binary=True) as cursor:
        # The protocol of binary results takes one statement only.
        cursor.execute(sql.SQL("SELECT * FROM {} AS q LIMIT 0").format(inner).as_bytes(connection))
        found = [(column.name, column.type_code in _NUMBERS) for column in cursor.description or []]
        if not found:
            raise QueryError("the query has no columns", todo="name at least one after SELECT")
        length = max(100, min(10_000, _MOST_CHARACTERS // (MAX_ROWS * len(found))))
        names = [sql.Identifier(f"c{i}") for i in range(len(found))]
        cells = sql.SQL(", ").join(
            sql.SQL("left({}::text, {})").format(name, sql.Literal(length + 1)) for name in names
        )
        statement = sql.SQL("SELECT {} FROM {} AS q ({}) LIMIT {}").format(
            cells, inner, sql.SQL(", ").join(names), sql.Literal(MAX_ROWS + 1)
        )
        rows: list[tuple[Any, ...]] = cursor.execute(statement.as_bytes(connection)).fetchall()
    shown = [tuple(_cut(value, length) for value in row) for row in rows[:MAX_ROWS]]
    return TextTable(found, shown, len(rows) > MAX_ROWS, length)


def _cut(value: str | None, length: int) -> str | None:
    return value if value is None or len(value) <= length else value[:length] + " …"
