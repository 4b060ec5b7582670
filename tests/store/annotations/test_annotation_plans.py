"""Statements about many annotations compare no row with each other row, even as planned for tables that are empty and were never analysed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from rftdata import Buffer

NUM = 5000


def plan_in(buffer: Buffer, function: str, **values: str) -> dict[str, Any]:
    """The plan of the only query of a function, with the function's settings."""
    with buffer.database.transaction() as connection:
        (row,) = connection.execute("SELECT prosrc, proconfig FROM pg_proc WHERE oid = %s::regproc", [function])
        (query,) = re.findall(r"RETURN QUERY\s(.*?);\s*END", row["prosrc"], re.DOTALL)
        for name, value in values.items():
            query = re.sub(rf"\b{name}\b", value, query)
        for setting in row["proconfig"]:
            connection.execute("SELECT set_config(%s, %s, true)", setting.split("=", 1))
        (row,) = connection.execute(f"EXPLAIN (FORMAT JSON) {query}")
    plan: dict[str, Any] = row["QUERY PLAN"][0]["Plan"]
    return plan


def read_again(plan: dict[str, Any], is_inner: bool = False) -> Iterator[str]:
    """What is read once for each row of something else: all but look-ups in an index."""
    if is_inner and plan["Node Type"] in ("CTE Scan", "Seq Scan", "Function Scan", "Sort", "Aggregate"):
        yield plan["Node Type"]
    for child in plan.get("Plans", []):
        is_new = child["Parent Relationship"] in ("InitPlan", "SubPlan")
        is_rescanned = plan["Node Type"] == "Nested Loop" and child["Parent Relationship"] == "Inner"
        yield from read_again(child, is_rescanned or (is_inner and not is_new))


def test_an_undo_of_many_compares_no_annotation_with_each(buffer: Buffer) -> None:
    ids = f"ARRAY[{','.join(map(str, range(NUM)))}]::bigint[]"
    plan = plan_in(buffer, "rft.undo_annotation_rows", ids=ids, why="NULL")
    assert set(read_again(plan)) <= {"Sort"}  # of the annotations of one target
