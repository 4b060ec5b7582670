"""Search of experiences by a condition that a person writes, a page at a time, and what the newest that match look like.

Ids are found first: that query names no more columns than the condition does, so joins of rft.v_experience that it does not need are left out.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import tuple_row

from rftdata.errors import QueryError
from rftdata.maintenance.conditions import chosen
from rftdata.postgres.database import fetch
from rftdata.postgres.written_text import check_condition, in_parentheses

MAX_SELECTED = 100_000
NUM_SUMMARIZED = 20_000
_NUM_BARS = 12
Connection = psycopg.Connection[dict[str, Any]]


@dataclass(frozen=True)
class Bar:
    """A bar of a histogram.

    Attributes:
        condition: what the experiences in it meet, in SQL.
    """

    label: str
    count: int
    condition: str


@dataclass(frozen=True)
class Selection:
    """All experiences that meet a condition.

    Attributes:
        digest: of the ids; another set of experiences has another digest.
        num_drawn: of those that were trained on already.
        rewards: number of experiences by their present reward, the most frequent first.
    """

    ids: list[int]
    digest: str
    num_groups: int
    num_drawn: int
    rewards: list[tuple[float | None, int]]


def matching_ids(connection: Connection, where: str, run_id: int | None, before: int | None, limit: int) -> list[int]:
    """Return the ids of the newest experiences that match, from before an id on.

    Raises:
        QueryError: the text is not a condition.
    """
    check_condition(connection, where)
    query = sql.SQL("SELECT experience_id FROM rft.v_experience WHERE {} ORDER BY experience_id DESC LIMIT {}")
    rows = _rows(connection, query.format(_filter(connection, where, run_id, before), sql.Literal(limit)))
    return [int(row[0]) for row in rows]


def histograms(connection: Connection, where: str, run_id: int | None) -> tuple[int, dict[str, list[Bar]]]:
    """Return how many of the newest `NUM_SUMMARIZED` experiences match at most, and histograms of their rewards and lengths."""
    query = sql.SQL(
        "SELECT reward, num_response_tokens FROM rft.v_experience WHERE {} ORDER BY experience_id DESC LIMIT {}"
    )
    rows = _rows(connection, query.format(_filter(connection, where, run_id, None), sql.Literal(NUM_SUMMARIZED)))
    names = ("reward", "num_response_tokens")
    return len(rows), {name: _bars(name, [row[i] for row in rows]) for i, name in enumerate(names)}


def select_all(connection: Connection, where: str, run_id: int | None) -> Selection:
    """Return all experiences that match.

    Raises:
        QueryError: the text is not a condition, or more than `MAX_SELECTED` match.
    """
    found = chosen(connection, where, None if run_id is None else [run_id])
    if len(found) > MAX_SELECTED:
        raise QueryError(
            "too many experiences for one batch",
            value=len(found),
            allowed=f"up to {MAX_SELECTED}",
            todo="narrow the condition",
        )
    ids = [experience for _, experience in found]
    rows = connection.execute(
        "SELECT e.reward, count(*) AS num, count(d.newest_of) AS num_drawn FROM unnest(%s::bigint[]) AS i (experience_id)"
        " JOIN rft.experience e USING (experience_id) LEFT JOIN rft.draw d ON d.newest_of = i.experience_id GROUP BY e.reward ORDER BY 2 DESC",
        [ids],
    ).fetchall()
    return Selection(
        ids,
        hashlib.sha256(repr(sorted(ids)).encode()).hexdigest(),
        len({group for group, _ in found}),
        sum(int(row["num_drawn"]) for row in rows),
        [(row["reward"], int(row["num"])) for row in rows],
    )


def _filter(connection: Connection, where: str, run_id: int | None, before: int | None) -> sql.Composable:
    """Return the whole condition. Ids of a run are limited to those that it has: newer runs are then not read."""
    (ids,) = fetch(connection, "ids_of_run", run_id=run_id)
    limits = [
        ("run_id = {}", run_id),
        ("experience_id < {}", before),
        ("experience_id >= {}", ids["first"]),
        ("experience_id <= {}", ids["last"]),
    ]
    parts: list[sql.Composable] = [
        sql.SQL(text).format(sql.Literal(value)) for text, value in limits if value is not None
    ]
    return sql.SQL(" AND ").join([*parts, in_parentheses(where)])


def _rows(connection: Connection, query: sql.Composable) -> list[tuple[Any, ...]]:
    with connection.cursor(row_factory=tuple_row, binary=True) as cursor:
        return cursor.execute(query.as_bytes(connection)).fetchall()


def _bars(name: str, values: Sequence[float | None]) -> list[Bar]:
    known = [value for value in values if value is not None]
    missing = len(values) - len(known)
    bars = [Bar("–", missing, f"{name} IS NULL")] if missing else []
    counts = Counter(known)
    if len(counts) <= _NUM_BARS:
        return bars + [Bar(f"{value:g}", counts[value], f"{name} = {value!r}") for value in sorted(counts)]
    low, high = min(known), max(known)
    width = (high - low) / _NUM_BARS
    places = Counter(min(int((value - low) / width), _NUM_BARS - 1) for value in known)
    for i in range(_NUM_BARS):
        begin, end = low + i * width, low + (i + 1) * width
        upper = f"{name} <= {high!r}" if i == _NUM_BARS - 1 else f"{name} < {end!r}"
        bars.append(Bar(f"{begin:.3g} – {end:.3g}", places[i], f"{name} >= {begin!r} AND {upper}"))
    return bars
