"""`rft bench algorithms` on a tiny course: points up to the budget, a failure as a result, and a summary in order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.runs import algorithms
from benchmarks.runs.algorithms import Budget

BUDGET = Budget(batch_groups=4, group_size=4, rollouts=32, evaluate_every=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    threads = torch.get_num_threads()
    folder = tmp_path_factory.mktemp("course")
    algorithms.prepare_seed((folder, 0, True))
    yield folder
    torch.set_num_threads(threads)  # the learner sets one


@pytest.mark.parametrize("name", ["grpo", "dapo", "mix"])
def test_a_run_ends_with_its_budget(folder: Path, name: str) -> None:
    record = algorithms.run(name, 0, BUDGET, folder, True)
    assert record["error"] is None
    points = record["points"]
    assert points[0]["rollouts"] == 0 and BUDGET.rollouts <= points[-1]["rollouts"] < 2 * BUDGET.rollouts
    assert all(0 <= point["score"] <= 1 for point in points)


def test_a_failure_is_a_result(folder: Path) -> None:
    record = algorithms.run("remax", 0, BUDGET, folder, True)
    assert "baseline rewards" in record["error"] and [point["rollouts"] for point in record["points"]] == [0]


def test_the_summary_has_the_best_algorithm_first_and_lists_failures() -> None:
    def curve(*scores: float) -> dict[str, Any]:
        points = [{"rollouts": i, "score": score, "seconds": 1.0} for i, score in enumerate(scores)]
        return {"points": points, "error": None}

    runs = {
        "worse": {0: curve(0.1, 0.4, 0.2)},
        "better": {0: curve(0.1, 0.5), 1: {"points": [], "error": "RftError: no"}},
    }
    first, second = algorithms.summary(runs)
    assert (first["algorithm"], first["end"], first["failed"]) == ("better", 0.5, ["seed 1: RftError: no"])
    assert (second["end"], second["best"]) == (0.2, 0.4)
