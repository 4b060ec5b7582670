"""What counts as growth in a long run, computed by hand."""

from __future__ import annotations

import mmap
from pathlib import Path

import psutil
import pytest

from benchmarks.runs.endurance import Sample, Usage, at_speed, growth, tenth


def sample(step: int, database_bytes: float, processes: dict[int, Usage]) -> Sample:
    return Sample(step, 0.02, {"database_bytes": database_bytes, "run_folder_files": 3.0}, {"trainer": processes})


def test_growth_is_per_step_without_replaced_processes() -> None:
    samples = [
        sample(10, 1000.0, {7: Usage(2.0 * 2**20, 5, 1.0)}),
        sample(20, 3000.0, {7: Usage(4.0 * 2**20, 6, 2.0)}),
        sample(30, 5000.0, {7: Usage(4.0 * 2**20, 6, 5.0), 8: Usage(2.0 * 2**20, 3, 90.0)}),
    ]
    assert tenth(samples) == {
        "database_bytes": 200.0,
        "run_folder_files": 3.0,
        "probe_s": 0.02,
        "processes": {"trainer": {"memory_mib": 4.0, "open_files": 6.0, "cpu_s_per_step": 0.2}},
    }


def test_only_figures_above_the_limit_grow() -> None:
    first = {"step_s": 0.1, "processes": {"trainer": {"memory_mib": 100.0, "cpu_s_per_step": 0.0}}}
    last = {
        "step_s": 0.11,
        "processes": {"trainer": {"memory_mib": 150.0, "cpu_s_per_step": 0.1}, "explorer": {"memory_mib": 1.0}},
    }
    assert growth(first, last, 1.2) == {"processes.trainer.memory_mib": pytest.approx(1.5)}


def test_a_slower_machine_does_not_count_as_growth() -> None:
    first = {"step_s": 0.1, "probe_s": 0.02, "processes": {"trainer": {"memory_mib": 1.0, "cpu_s_per_step": 0.1}}}
    last = {"step_s": 0.15, "probe_s": 0.03, "processes": {"trainer": {"memory_mib": 1.5, "cpu_s_per_step": 0.3}}}
    found = growth(first, at_speed(last, 1.5), 1.2)
    assert found == {
        "processes.trainer.cpu_s_per_step": pytest.approx(2.0),
        "processes.trainer.memory_mib": pytest.approx(1.5),
    }


def test_mapped_files_do_not_count_as_memory_of_a_process(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(64 * 2**20))
    before = Usage.of(psutil.Process())
    with (tmp_path / "large").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        content.find(b"1")  # touches every page
        mapped = Usage.of(psutil.Process())
    # Not of the heap, which may have as much that earlier tests left.
    with mmap.mmap(-1, 64 * 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
        for _ in range(64):
            held.write(b"1" * 2**20)
        after = Usage.of(psutil.Process())
    assert mapped.open_files > before.open_files and mapped.memory_bytes - before.memory_bytes < 32 * 2**20
    assert after.memory_bytes - before.memory_bytes > 60 * 2**20
