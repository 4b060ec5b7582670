"""What counts as growth in a long run, computed by hand."""

from __future__ import annotations

import pytest

from benchmarks.endurance import Sample, growth, tenth


def sample(step: int, database_bytes: float, processes: dict[int, tuple[float, float]]) -> Sample:
    return Sample(step, {"database_bytes": database_bytes, "run_folder_files": 3.0}, {"trainer": processes})


def test_growth_is_per_step_and_processes_that_were_replaced_are_left_out() -> None:
    samples = [
        sample(10, 1000.0, {7: (2.0 * 2**20, 1.0)}),
        sample(20, 3000.0, {7: (4.0 * 2**20, 2.0)}),
        sample(30, 5000.0, {7: (4.0 * 2**20, 5.0), 8: (2.0 * 2**20, 90.0)}),
    ]
    assert tenth(samples) == {
        "database_bytes": 200.0, "run_folder_files": 3.0, "processes": {"trainer": {"uss_mib": 4.0, "cpu_s_per_step": 0.2}},
    }  # fmt: skip


def test_only_what_exceeds_the_limit_grows() -> None:
    first = {"step_s": 0.1, "processes": {"trainer": {"uss_mib": 100.0, "cpu_s_per_step": 0.0}}}
    last = {
        "step_s": 0.11,
        "processes": {"trainer": {"uss_mib": 150.0, "cpu_s_per_step": 0.1}, "explorer": {"uss_mib": 1.0}},
    }
    assert growth(first, last, 1.2) == {"processes.trainer.uss_mib": pytest.approx(1.5)}
