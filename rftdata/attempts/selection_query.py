"""The query of `sampling.source`: run once, read-only, with its columns and ids checked."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

import psycopg
import psycopg.errors
from psycopg.rows import tuple_row

from rftdata.errors import QueryError
from rftdata.postgres.database import Connection, fetch, limit_statements
from rftdata.postgres.written_text import check_complete
from rftdata.user_code.time_limits import lowered

KINDS = {"experience_id": "experience", "pair_id": "pair", "group_id": "group"}
PRIORITY = "priority"
_ALLOWED = "experience_id, pair_id, or group_id"
_TODO = "write one SELECT of experience_id (or pair_id, or group_id), for example: select experience_id from rft.experience where reward = 1"


def run_query(connection: Connection, sql: str, *, with_priority: bool) -> tuple[str, list[tuple[Any, ...]]]:
    """Return the name of the query's column of ids, and its rows: an id, and its priority if there are priorities."""
    # Inside a subquery, because only a SELECT is allowed there. On separate lines, because the query may end in a comment.
    # In binary, because that protocol takes only one statement.
    wrapped = f"SELECT * FROM (\n{sql}\n) AS selected"
    connection.execute("SET LOCAL search_path TO rft, public")  # as in `rft sql`
    limit_s = lowered(math.inf)
    if limit_s < math.inf:  # the limit of `rft check`; a run has none
        limit_statements(connection, limit_s)
    try:
        check_complete(connection, sql, "{}")
        with connection.cursor(row_factory=tuple_row, binary=True) as cursor:
            cursor.execute(wrapped.encode())
            names = [column.name for column in cursor.description or []]
            _check_columns(names, with_priority=with_priority)
            rows = cursor.fetchall()
            return (names[0], rows) if names[0] != PRIORITY else (names[1], [row[::-1] for row in rows])
    except psycopg.errors.ReadOnlySqlTransaction as error:
        raise QueryError(
            f"the query of sampling.source writes: {error.diag.message_primary}",
            value=sql,
            allowed="a query that only reads",
            todo=_TODO,
        ) from error
    except psycopg.errors.QueryCanceled as error:
        raise QueryError(
            f"the query of sampling.source did not end within {limit_s:g} s",
            value=sql,
            todo="correct it, or start the run, which has no such limit",
        ) from error
    except psycopg.OperationalError:
        raise
    except psycopg.DatabaseError as error:
        raise QueryError(
            f"the database rejected the query of sampling.source: {error.diag.message_primary}", value=sql, todo=_TODO
        ) from error


def _check_columns(names: Sequence[str], *, with_priority: bool) -> None:
    """Check the names of the query's columns.

    Raises:
        QueryError: they are not those of a selection.
    """
    ids = [name for name in names if name != PRIORITY]
    if len(ids) != 1 or ids[0] not in KINDS or len(names) > 2:
        raise QueryError(
            "sampling.source must return one column of ids",
            value=", ".join(names),
            allowed=f"{_ALLOWED}; and {PRIORITY} beside it",
            todo=_TODO,
        )
    if PRIORITY in names and not with_priority:
        raise QueryError(
            "sampling.source returns priorities, and sampling.order does not use them",
            value=", ".join(names),
            allowed=ids[0],
            todo=f"set sampling.order: prioritized, or remove the column {PRIORITY}",
        )
    if PRIORITY not in names and with_priority:
        raise QueryError(
            "sampling.order: prioritized needs the priority of each row",
            value=", ".join(names),
            allowed=f"{ids[0]}, {PRIORITY}",
            todo=f"select a number as {PRIORITY}, for example: select group_id, std_reward as {PRIORITY} from rft.v_group",
        )


def weights_of(
    connection: Connection, item_ids: Sequence[int], priorities: Mapping[int, Any], exponent: float
) -> tuple[float, ...]:
    """Return the weight of each item, in the order of the ids.

    Raises:
        QueryError: a priority is not a finite number of at least 0.
    """
    values = []
    for item_id in item_ids:
        priority = priorities[item_id]
        if not isinstance(priority, int | float | Decimal) or not (math.isfinite(priority) and priority >= 0):
            raise QueryError(
                f"the priority of {item_id} in sampling.source is not valid",
                value=str(priority),
                allowed="finite numbers of at least 0",
                todo="replace NULL in the query, for example: coalesce(std_reward, 0) as priority",
            )
        values.append(float(priority))
    (row,) = fetch(connection, "weights_of_priorities", priorities=values, exponent=exponent)
    return tuple(row["weights"])


def checked_ids(column: str, values: Sequence[Any]) -> tuple[int, ...]:
    if not values:
        raise QueryError("sampling.source selects nothing, so there is nothing to train on", todo="widen its WHERE")
    wrong = [value for value in values if type(value) is not int]
    if wrong:
        raise QueryError(
            f"sampling.source returns a {column} that is not an id", value=str(wrong[0]), allowed="whole numbers"
        )
    twice = [value for value, count in Counter(values).items() if count > 1]
    if twice:
        raise QueryError(
            f"sampling.source returns {len(twice)} rows more than once; the first is {column} {min(twice)}",
            todo="check its joins, or SELECT DISTINCT; to train on a row several times, set sampling.epochs",
        )
    return tuple(sorted(values))
