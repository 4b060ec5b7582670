"""The short version of `make crash-test`: the same program, fewer failures."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.network import unavailable
from tests.support.session_processes import PROGRAM, environment, processes
from tests.support.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

CHECKOUT = Path(__file__).resolve().parents[2]
KILLS = 60


@pytest.mark.parametrize(
    ("command", "number"),
    [
        (["make", "crash-test", "KILLS=100000"], signal.SIGTERM),
        ([sys.executable, "-m", "tests.crash.ray_storm"], signal.SIGKILL),
    ],
    ids=["SIGTERM to make", "kill -9 with Ray"],
)
def test_an_interrupted_storm_leaves_no_process_behind(
    command: list[str], number: signal.Signals, tmp_path: Path
) -> None:
    variable, mark = "RFT_TEST_STORM", secrets.token_hex(4)
    with (tmp_path / "log").open("wb") as log:
        storm = subprocess.Popen(command, cwd=CHECKOUT, env={**os.environ, variable: mark}, stdout=log, stderr=log)
    try:
        # The program, its guard, five roles, the database; more on Ray.
        wait_until(lambda: len(processes(mark, variable)) > 7, "the roles", process=storm)
        marks = {environment(process).get(PROGRAM) for process in processes(mark, variable)} - {None}
        (begun,) = map(str, marks)
        storm.send_signal(number)
        storm.wait(PATIENCE_S)
        wait_until(lambda: not processes(mark, variable), "the end of all processes")
        wait_until(lambda: not _left_behind(begun), "the end of its folders and networks")
    finally:
        for process in processes(mark, variable):
            process.kill()


def _left_behind(begun: str) -> list[str]:
    """The folders and network interfaces of a program."""
    networks = [path for path in Path("/sys/class/net").glob("*/ifalias") if begun in path.read_text()]
    return [*map(str, networks), *map(str, Path(tempfile.gettempdir()).glob(f"rft-test-{begun}-*"))]


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
    # It looked at something: experiences, steps, labels, annotations, weights.
    pattern = r"(\d+) experiences, (\d+) of them of several turns, (\d+) steps in (\d+) attempts, (\d+) labels, (\d+) annotations, (\d+) times weights"
    done_what = re.search(pattern, done.stdout)
    assert done_what is not None and all(int(number) > 0 for number in done_what.groups()), done.stdout
