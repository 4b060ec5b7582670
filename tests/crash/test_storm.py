"""The short version of `make crash-test`: the same processes, the same examination, fewer kills."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.crash.storm import storm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

KILLS = 60


def test_kills_at_random_lose_nothing_and_train_nothing_twice(server_folders: Path) -> None:
    folder = server_folders / "storm"
    folder.mkdir()
    seed = int(os.environ.get("SEED", "20"))
    report = storm(folder, KILLS, seed, print)
    assert report.findings.nothing, f"SEED={seed}: {report.findings}"
    assert sum(report.events.values()) == KILLS
    assert report.findings.experiences > 0 and report.findings.steps > 0 and report.findings.labels > 0
    assert report.findings.attempts > report.events["trainer"]
