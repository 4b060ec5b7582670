"""What people wait for reads few rows, however many there are, and compares no row with each other row."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from rftdata import Buffer
from rftdata.annotations import LabelKind, define_kinds
from rftdata.postgres.database import Connection, fetch
from rftdata.reports.experience_search import matching_ids
from tests.store.conftest import Login
from tests.support.store_roles import own_group

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


@pytest.fixture
def two_runs(buffer: Buffer) -> Buffer:
    """The runs `old` and `new`, each with 300 groups of two experiences; people are asked about all of the old one, since the last ANALYZE."""
    define_kinds(buffer, [LabelKind("good", "bool"), LabelKind("best", "ranking", target="group")], author="owner")
    for name in ("old", "new"):
        run = buffer.create_run(name=name, config={}, seed=1, steps=1, pipeline_version="none")
        with buffer.writer(run) as writer:
            writer.insert(*(own_group([0.0, 1.0], task_key=f"{name} {i}") for i in range(300)))
    buffer.sql(
        "INSERT INTO rft.question (kind, target_id) SELECT 'good', experience_id FROM rft.experience WHERE run_id = 1"
    )
    buffer.sql("ANALYZE")
    return buffer


def rows_read(connection: Connection, tables: str, work: Callable[[], object]) -> int:
    """Rows of tables that `work` reads in the transaction of `connection`."""
    query = (
        "SELECT coalesce(sum(seq_tup_read + idx_tup_fetch), 0)::bigint AS n FROM pg_stat_xact_user_tables"
        f" WHERE schemaname = 'rft' AND relname = ANY ('{{{tables}}}')"
    )
    (before,) = connection.execute(query).fetchall()
    work()
    (after,) = connection.execute(query).fetchall()
    return int(after["n"]) - int(before["n"])


def test_a_page_of_one_run_reads_no_rows_of_others(two_runs: Buffer) -> None:
    tables = "experience,rollout,rollout_group"
    with two_runs.database.transaction() as connection:
        fetch(connection, "plan_by_index")
        connection.execute("SET LOCAL enable_sort = off")  # as in a large buffer, where sorting is not cheap
        for run_id in (1, 2):
            read = rows_read(connection, tables, partial(matching_ids, connection, "true", run_id, None, 5))
            assert 0 < read < 50, run_id
        connection.execute("SET LOCAL enable_sort = on")
        for name, kind in (("studio_experiences_to_label", "good"), ("studio_groups_to_label", "best")):
            values = {"kind": kind, "after": 0, "count": 3, "run_id": 2}
            read = rows_read(connection, tables, partial(fetch, connection, name, **values))
            assert 0 < read < 350, name  # the groups of the run are put in order


def test_a_claim_reads_as_few_questions_however_many_wait(two_runs: Buffer) -> None:
    values = {"queue": "good", "num": 3, "run_id": None, "holding": []}
    with two_runs.database.transaction() as connection:
        read = rows_read(
            connection, "question,assignment,experience", partial(fetch, connection, "claim_questions", **values)
        )
        assert 0 < read < 100


@pytest.mark.parametrize(
    ("table", "condition"),
    [
        ("annotation", "num = 1 AND choice = 'x' AND annotation_id > 3 AND made_at > now() AND source = 'human'"),
        ("comment", "comment < 'm' AND author = 'ada' AND kind = 'hidden' AND key = 'x'"),
    ],
)
def test_row_security_is_asked_before_a_condition_that_explain_would_tell(
    buffer: Buffer, login: Login, table: str, condition: str
) -> None:
    session = login("rft_labeler")
    session.execute("SET enable_indexscan = off")
    session.execute("SET enable_bitmapscan = off")
    plan = "\n".join(row[0] for row in session.execute(f"EXPLAIN SELECT FROM rft.{table} WHERE {condition}").fetchall())  # type: ignore[call-overload]
    (first,) = re.findall(
        rf"Filter: \(+InitPlan 1\).col1 OR rft\.sees_{table}\([^)]*\([^)]*\)[^)]*\)\) AND (.*)\)", plan
    )
    assert first and "sees_" not in first
