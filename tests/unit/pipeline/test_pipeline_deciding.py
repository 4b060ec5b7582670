"""Failing stages: failing rows are set aside. A stage that fails on everything is tried again later, and nothing is lost."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from operators.base import Operator, StageOutcome, UnavailableError
from operators.chain.build import build_chain
from operators.chain.isolation import decide_despite_failures
from operators.chain.stage import StageError
from rftcore.pipeline.group_decisions import decide_groups
from rftcore.pipeline.patience import Patience
from rftdata.pipeline.records import SealedBatch
from tests.support.batches import batch_of_groups

failing: set[int] = set()
is_unavailable = False
calls: list[int] = []
scored: list[int] = []


def fails(row: dict[str, Any]) -> bool:
    calls.append(row["experience_id"])
    if is_unavailable or row["experience_id"] in failing:
        raise ConnectionError("no answer")
    return True


class Grade(Operator):
    """Remembers which rows it was asked for."""

    reads = frozenset({"response"})
    scores = {"grade": pa.float64()}  # noqa: RUF012
    rowwise = True

    def apply(self, table: pa.Table) -> StageOutcome:
        scored.extend(table["experience_id"].to_pylist())
        return StageOutcome.keep_all(table.num_rows, {"grade": pa.array([1.0] * table.num_rows)})


@pytest.fixture(autouse=True)
def _fresh() -> None:
    global is_unavailable
    failing.clear()
    calls.clear()
    is_unavailable = False


def batch(groups: int, size: int = 4) -> SealedBatch:
    table = batch_of_groups(*([0.0, 1.0] * (size // 2) for _ in range(groups)))
    return SealedBatch(table, sorted(set(table["group_id"].to_pylist())))


def chain(min_group_size: int = 2) -> Any:
    return build_chain([{f"{__name__}:fails": {}}], min_group_size=min_group_size)


def test_a_stage_that_fails_on_everything_decides_nothing() -> None:
    global is_unavailable
    is_unavailable = True
    with pytest.raises(StageError, match="no answer"):
        decide_groups(chain(), batch(64), patient=True)
    assert len(calls) <= 16  # the batch, a few groups of it, each until its first row, and their rows


def test_rows_that_fail_are_set_aside_where_others_pass() -> None:
    failing.update({101, 130})
    verdicts = decide_groups(chain(), batch(64), patient=True)
    dropped = [row for row in verdicts.decisions.to_pylist() if not row["kept"]]
    assert sorted(row["experience_id"] for row in dropped) == [101, 130]
    assert all("no answer" in str(row["reason"]) for row in dropped)
    assert verdicts.decisions.num_rows == 256
    assert len(calls) < 6 * 256


def test_a_row_that_fails_in_every_group_is_set_aside_and_the_others_continue() -> None:
    failing.update(range(101, 356, 4))
    verdicts = decide_groups(chain(), batch(64), patient=True)
    assert {d["experience_id"] for d in verdicts.decisions.to_pylist() if not d["kept"]} == failing
    assert verdicts.decisions.num_rows == 256


def test_scores_computed_before_a_stage_failed_are_used_again() -> None:
    failing.update({101, 130})
    scored.clear()
    both = build_chain([{f"{__name__}:Grade": {}}, {f"{__name__}:fails": {}}], min_group_size=2)
    verdicts = decide_groups(both, batch(64), patient=True)
    assert sorted(scored) == list(range(100, 356))
    assert sorted(key for found in verdicts.scores for key, *_ in found.rows()) == list(range(100, 356))
    assert sorted(d["experience_id"] for d in verdicts.decisions.to_pylist() if not d["kept"]) == [101, 130]


@pytest.mark.parametrize("bad", [{101}, {101, 130}, {100, 101, 102, 103}])
def test_the_counts_of_stages_that_did_not_fail_add_up_to_the_rows(bad: set[int]) -> None:
    failing.update(bad)
    both = build_chain([{"drop_truncated": {}}, {f"{__name__}:fails": {}}], min_group_size=2)
    stages = decide_groups(both, batch(16), patient=True).stages
    assert sum(run.rows_in for run in stages if run.stage == "drop_truncated") == 64
    passed = [run for run in stages if run.stage != "drop_truncated" and run.error is None]
    assert sum(run.rows_kept for run in passed) == 64 - len(bad)
    assert any("no answer" in str(run.error) for run in stages)


def test_a_group_without_a_remaining_row_is_set_aside_as_a_whole() -> None:
    failing.update({100, 101, 102})
    verdicts = decide_groups(chain(), batch(8), patient=True)
    dropped = {d["experience_id"]: d["reason"] for d in verdicts.decisions.to_pylist() if not d["kept"]}
    assert sorted(dropped) == [100, 101, 102, 103]
    assert "only 1 rollout" in str(dropped[103])


def test_a_row_that_fails_in_a_group_that_is_alone_is_set_aside_at_once() -> None:
    failing.add(101)
    verdicts = decide_groups(chain(), batch(1), patient=True)
    assert [d["experience_id"] for d in verdicts.decisions.to_pylist() if not d["kept"]] == [101]


def test_a_failing_group_alone_in_its_batch_is_retried_for_a_while_and_set_aside_if_others_passed() -> None:
    global is_unavailable
    is_unavailable = True
    now = [0.0]
    patience = Patience(60.0, lambda: now[0])
    patience.passed()
    alone = batch(1)
    waits = []
    while patience.has_more(alone):
        with pytest.raises(StageError) as caught:
            decide_groups(chain(), alone, patient=True)
        waits.append(patience.failed(caught.value))
        now[0] += waits[-1]
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0]
    assert all(
        not d["kept"] for d in decide_groups(chain(), alone, patient=patience.has_more(alone)).decisions.to_pylist()
    )


@pytest.mark.parametrize("groups", [1, 2])
def test_a_stage_that_never_works_ends_the_worker_with_its_error(groups: int) -> None:
    global is_unavailable
    is_unavailable = True
    now = [0.0]
    patience = Patience(60.0, lambda: now[0])

    def work() -> None:
        for _ in range(100):
            try:
                decide_groups(chain(), batch(groups), patient=patience.has_more(batch(groups)))
            except StageError as error:
                now[0] += patience.failed(error)

    with pytest.raises(StageError, match="no answer"):
        work()
    assert now[0] == 63.0
    patience.passed()
    assert patience.failed(StageError("again")) == 1.0


class Unavailable(Operator):
    """Fails on one row at first, and is unavailable afterwards."""

    def apply(self, table: pa.Table) -> StageOutcome:
        calls.append(table.num_rows)
        if len(calls) > 1:
            raise UnavailableError("the endpoint is unavailable")
        raise ValueError("no number")


def test_a_stage_that_becomes_unavailable_sets_no_task_aside() -> None:
    stage = build_chain([{f"{__name__}:Unavailable": {}}])
    with pytest.raises(StageError, match="unavailable"):
        decide_despite_failures(stage, batch(8, 2).table, as_whole=True, min_group_size=1, retried=True)


def test_every_row_of_an_experience_pipeline_is_tried_however_many_fail() -> None:
    rows = batch_of_groups(*([1.0] for _ in range(64)))
    failing.update(
        key for key in rows["experience_id"].to_pylist() if key % 8
    )  # the eight that are spread over the batch fail
    failing.discard(101)
    verdicts = decide_despite_failures(chain(1), rows)
    assert verdicts.failed == failing
    tasks = decide_despite_failures(chain(1), rows, retried=True)
    assert verdicts.failed <= tasks.failed and len(calls) < 64 * 12


def test_each_of_a_few_tasks_is_tried_before_the_stage_is_taken_to_be_broken() -> None:
    rows = batch_of_groups(*([1.0] for _ in range(10)))
    failing.update(range(100, 110))
    failing.difference_update({104, 108})
    verdicts = decide_despite_failures(chain(1), rows, patient=True, min_group_size=1, retried=True)
    assert verdicts.failed == failing
