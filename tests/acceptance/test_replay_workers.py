"""`rft pipeline replay --workers N`: several processes decide as one does, and go on when one of them is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

import rftdata
from tests.support.command_line import rft_command, rft_environment
from tests.support.stored_run import StoredRun
from tests.support.waiting import RUN_S, wait_until, wait_until_ended

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

CONFIG = """
run: {name: sums}
buffer: {uri: "%(uri)s", segments: "%(segments)s"}
model: {path: tiny}
tasks: [{name: sums, source: none.jsonl}]
pipelines:
  batch_groups: %(batch_groups)s
  experience:
    - sql: "SELECT * REPLACE (reward + count(*) OVER () AS reward) FROM batch"   # differs where batches differ
    - "./mine.py:judge"
    - drop_zero_variance_groups: {}
algorithm: {name: grpo, group_size: 4}
explorer: {engine: none}
trainer: {batch_groups: 2, learning_rate: 0.001}
steps: 4
"""
STAGES = """
import os
import time
from pathlib import Path

HERE = Path(__file__).parent


def judge(row):
    if (HERE / "meeting").exists():  # before its first answer every process waits for so many
        (HERE / f"{os.getpid()}.here").touch()
        while len(list(HERE.glob("*.here"))) < int((HERE / "meeting").read_text()):
            time.sleep(0.05)
    while (HERE / "hold").exists() and row["group_id"] > 12:
        time.sleep(0.05)
    assert row["group_id"] % 7, "no answer for this group"
    return row["experience_id"] % 5 > 0
"""
GROUPS, SIZE = 31, 4


@pytest.fixture
def run(buffer: rftdata.Buffer, tmp_path: Path) -> StoredRun:
    run = StoredRun(buffer)
    run.attempt()
    for number in range(GROUPS):
        run.group(number // 8, [float(number % 3 == 0), 1.0, 0.0, 1.0] if number % 4 else [1.0] * SIZE)
    (tmp_path / "mine.py").write_text(STAGES)
    return run


def command(run: StoredRun, folder: Path, version: str, workers: int, batch_groups: int) -> list[str]:
    file = folder / f"{version}.yaml"
    values = {"uri": run.buffer.config.uri, "segments": run.buffer.config.segments, "batch_groups": batch_groups}
    file.write_text(CONFIG % values)
    return rft_command("pipeline", "replay", file, "--version", version, "--workers", workers, "--json")


def replay(run: StoredRun, folder: Path, version: str, workers: int, batch_groups: int) -> dict[str, Any]:
    done = subprocess.run(
        command(run, folder, version, workers, batch_groups),
        env=rft_environment(),
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def verdicts(run: StoredRun, version: str) -> list[tuple[Any, ...]]:
    found = run.buffer.sql(
        "SELECT experience_id, kept, stage, reason, reward, priority FROM rft.verdict WHERE pipeline_version = %s ORDER BY 1, verdict_id",
        [version],
    )
    return [tuple(row.values()) for row in found.to_pylist()]


def test_the_verdicts_do_not_depend_on_the_number_of_processes(run: StoredRun, tmp_path: Path) -> None:
    one = replay(run, tmp_path, "one", 1, 3)
    (tmp_path / "meeting").write_text("3")  # so that none does everything before the others are there
    three = replay(run, tmp_path, "three", 3, 3)
    assert verdicts(run, "one") == verdicts(run, "three")
    assert len(verdicts(run, "one")) == GROUPS * SIZE
    shares = [found.pop("workers") for found in (one, three)]
    assert {**one, "version": ""} == {**three, "version": ""}
    assert one["failed_by"] and one["num_kept"]
    assert [len(share) for share in shares] == [1, 3]
    for share in shares:
        assert sum(worker["num_groups"] for worker in share) == GROUPS
        assert sum(worker["num_experiences"] for worker in share) == GROUPS * SIZE
        assert all(worker["num_groups"] and worker["seconds"] > 0 for worker in share)
    assert len({worker["pid"] for worker in shares[1]}) == 3


def test_a_replay_of_single_groups_goes_on_when_one_of_its_processes_is_killed(run: StoredRun, tmp_path: Path) -> None:
    """Whether a group that fails alone is set aside depends on the group before it, which another process may have."""
    replay(run, tmp_path, "one", 1, 1)
    (tmp_path / "meeting").write_text("2")
    (tmp_path / "hold").touch()
    process = subprocess.Popen(
        command(run, tmp_path, "two", 2, 1),
        env=rft_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: len(verdicts(run, "two")) >= 6 * SIZE, "six verdicts", process=process, pause_s=0.1)
    at_work = run.buffer.sql("SELECT pid FROM rft.worker WHERE role = 'replay' AND stopped_at IS NULL ORDER BY 1")[
        "pid"
    ].to_pylist()
    assert len(at_work) == 2
    os.kill(at_work[0], signal.SIGKILL)
    (tmp_path / "hold").unlink()
    output, errors = process.communicate(timeout=RUN_S)
    assert process.returncode == 0, errors
    done = json.loads(output)
    assert done["num_groups"] == GROUPS
    assert verdicts(run, "two") == verdicts(run, "one")
    assert run.buffer.sql("SELECT pid FROM rft.worker WHERE role = 'replay' AND stopped_at IS NULL").num_rows == 0
    wait_until_ended(worker["pid"] for worker in done["workers"])  # Ray ends them just after
