"""A short soak: producers, consumers, a reviewer and a pipeline worker at once, for some seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_short_soak_trains_everything_once_and_leaves_no_bloat(server_folders: Path) -> None:
    # Embedded servers of tests do not live below pytest's own folder: see `server_folders`.
    command = [
        sys.executable,
        "-m",
        "benchmarks.soak",
        "--minutes",
        "0.3",
        "--rate",
        "300",
        "--every",
        "2",
        "--seed",
        "5",
    ]
    command += ["--folder", str(server_folders), "--plot", str(server_folders / "soak.png")]
    ended = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=400, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    results = json.loads(ended.stdout)
    assert results["errors"] == [] and results["exactly_once"] is True
    assert results["experiences"] > 1500 and results["labels"] > 10
    assert results["purged"] > 100, "retention keeps the newest thousand"
    # One file for each writer and each purge, and no more bytes than the arrays have (5.6 kB on average) and a little.
    assert 4 < results["segment_files"] <= 4 + 18 / 2
    assert 4000 < results["segment_bytes_an_experience"] < 8000
    assert results["dead_rows_after_vacuum"] == 0
    assert (server_folders / "soak.png").stat().st_size > 10_000
