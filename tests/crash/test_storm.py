"""The short version of `make crash-test`: the same program, fewer failures."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.network import unavailable

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

CHECKOUT = Path(__file__).resolve().parents[2]
KILLS = 60


def test_failures_at_random_lose_nothing_and_train_nothing_twice(server_folders: Path) -> None:
    folder = server_folders / "storm"
    folder.mkdir()
    program = [
        sys.executable,
        "-m",
        "tests.crash.storm",
        "--kills",
        KILLS,
        "--seed",
        os.environ.get("SEED", "20"),
        "--folder",
        folder,
    ]
    done = subprocess.run(list(map(str, program)), cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    last = done.stdout.splitlines()[-1]
    assert last.startswith(f"{KILLS} kills: 0 lost, 0 trained twice, 0 mislabelled, 0 on old weights, resume p99 "), (
        done.stdout
    )
    (summary,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    without = unavailable()
    if without is None:
        assert json.loads(summary)["cuts"]["number"] > 0
    else:
        assert f"NO NETWORK CUTS: {without}" in done.stdout
    # What the slowest lives waited for is their whole time.
    slowest = json.loads(summary)["slowest lives"]
    lives = re.search(r"; (\d+) lives, first claim", done.stdout)
    assert lives is not None and len(slowest) == min(10, int(lives[1])) > 0, done.stdout
    assert slowest == sorted(slowest, key=lambda life: -life["seconds"])
    for life in slowest:
        assert sum(part for _, _, part in life["parts"]) == pytest.approx(life["seconds"], abs=0.1), life
    # It looked at something: experiences, steps, labels, weights.
    pattern = r"(\d+) experiences, (\d+) steps in (\d+) attempts, (\d+) labels, (\d+) times weights"
    done_what = re.search(pattern, done.stdout)
    assert done_what is not None and all(int(number) > 0 for number in done_what.groups()), done.stdout
