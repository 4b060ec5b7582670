"""`rft bench algorithms --demo`: configurations that can run, a curve from what was sampled, and a summary that keeps failures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.runs import demo
from benchmarks.runs.algorithms import ALGORITHMS
from benchmarks.runs.demo import DemoBudget
from rftcore.config.run import parse_config
from rftcore.resolved import ResolvedRun
from tests.support.checking import refuse_names


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_has_a_configuration_that_can_run(name: str, tmp_path: Path) -> None:
    budget = DemoBudget(steps=12, batch_groups=3)
    config = parse_config(demo.configuration(name, 5, budget, "nowhere", tmp_path), tmp_path, name)
    refuse_names(ResolvedRun(config))
    assert config.algorithm.name == name and config.run.seed == 5 and not config.eval.test
    assert config.steps == (6 if name == "dapo" else 12)


def test_a_point_of_a_curve_is_the_mean_of_a_window() -> None:
    sampled = [{"explore_step": step, "rollouts": 4, "right": float(step)} for step in range(10)]
    points = demo.curve(sampled, 10)
    assert [(point["rollouts"], point["step"], point["score"]) for point in points] == [
        (8, 2, 0.125),
        (16, 4, 0.625),
        (24, 6, 1.125),
        (32, 8, 1.625),
        (40, 10, 2.125),
    ]


def test_the_summary_keeps_runs_that_failed() -> None:
    def record(validation: dict[int, float], error: str | None) -> dict[str, Any]:
        return {"points": [], "validation": validation, "seconds": 1.0, "error": error}

    rows = demo.summary({"a": record({0: 0.2}, "stopped after 3 s"), "b": record({0: 0.2, 9: 0.5}, None)})
    assert [(row["algorithm"], row["validation_end"], row["failed"]) for row in rows] == [
        ("b", 0.5, None),
        ("a", None, "stopped after 3 s"),
    ]
