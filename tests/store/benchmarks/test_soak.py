"""A short soak: producers, consumers, a reviewer and a pipeline worker at once, for some seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import PATIENCE_S

CHECKOUT = Path(__file__).resolve().parents[3]


def soaked(folder: Path, minutes: float) -> dict[str, Any]:
    """The results of a soak."""
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        "soak",
        "--minutes",
        str(minutes),
        "--rate",
        "300",
        "--every",
        "2",
        "--seed",
        "5",
    ]
    # Embedded servers of tests do not live below pytest's own folder: see `server_folders`.
    command += ["--folder", str(folder), "--plot", str(folder / "soak.png")]
    ended = subprocess.run(
        command, cwd=CHECKOUT, capture_output=True, text=True, timeout=3 * PATIENCE_S + 60 * minutes, check=False
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    results: dict[str, Any] = json.loads(ended.stdout)
    return results


@pytest.mark.long
def test_a_short_soak_trains_everything_once_and_leaves_no_bloat(server_folders: Path) -> None:
    results = soaked(server_folders, minutes := 0.3)
    # Retention keeps the newest thousand, and a slow machine writes few in that time.
    while results["purged"] <= 100 and minutes < 4:
        results = soaked(server_folders, minutes := 2 * minutes)
    assert results["errors"] == [] and results["exactly_once"] is True
    assert results["experiences"] > 1000 and results["labels"] > 10 and results["purged"] > 100
    # One file for each writer and each purge. A purge begins every two seconds at most, and some come after the last write.
    assert 4 < results["segment_files"] <= 4 + results["samples"][-1]["at_s"] / 2 + 3
    # No more bytes than the arrays have (5.6 kB on average) and a little.
    assert 4000 < results["segment_bytes_an_experience"] < 8000
    assert results["dead_rows_after_vacuum"] == 0
    assert (server_folders / "soak.png").stat().st_size > 10_000
