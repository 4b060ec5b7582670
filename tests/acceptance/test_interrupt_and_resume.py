"""Ctrl-C, or kill -9 of any one process, then `rft run --resume`: one continuous curve to the planned number of steps."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

import rftdata
from tests.support.command_line import EXAMPLE, Rft, report, rft_command, rft_environment, rows
from tests.support.warm_up import Warm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 12
OVERRIDES = (
    "explorer.engine=transformers", "explorer.engine_args={dtype: float32, context_length: 64}", "trainer.checkpoint_every=3", "eval.every=6",
    "trainer.batch_groups=4", f"steps={STEPS}", "eval.test=[]", "explorer.max_refill=64",
)  # fmt: skip


def start(buffer: Path, warm: Warm) -> subprocess.Popen[str]:
    options = [part for override in (*OVERRIDES, f"model.path={warm.model}") for part in ("--set", override)]
    command = rft_command("run", EXAMPLE / "grpo.yaml", "--plain", "--buffer", buffer, *options)
    return subprocess.Popen(
        command,
        env=rft_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for_step(buffer: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        assert process.poll() is None, (
            f"the run ended before step {step}:\n{process.stdout.read() if process.stdout else ''}"
        )
        if (buffer / "postgres" / "postmaster.pid").exists():
            with rftdata.open(str(buffer)) as opened:
                done = opened.sql("select coalesce(max(trainer_step), 0) as step from rft.train_step")["step"][
                    0
                ].as_py()
            if done >= step:
                return
        time.sleep(0.2)
    raise AssertionError(f"step {step} was not reached")


def pid_of(buffer: Path, victim: str) -> int:
    if victim == "postgres":
        return int((buffer / "postgres" / "postmaster.pid").read_text().split()[0])
    return int(rows(buffer, f"select pid from rft.worker where role = '{victim}' and stopped_at is null")[0]["pid"])


def assert_continuous(rft: Rft, buffer: Path) -> None:
    result = report(rft, buffer, "sort-grpo")
    assert result["status"] == "finished"
    assert result["steps"]["done"] == STEPS
    curve = rows(buffer, "select trainer_step from rft.v_train_step order by trainer_step")
    assert [row["trainer_step"] for row in curve] == list(range(1, STEPS + 1))
    twice = """select experience_id from rft.v_consumption group by experience_id having count(*) > 1"""
    assert rows(buffer, twice) == []
    with rftdata.open(str(buffer)) as opened:
        assert list(opened.verify()) == []


@pytest.mark.parametrize("victim", ["explorer", "pipeline", "trainer", "supervisor"])
def test_a_run_goes_on_after_kill_9_of_the(victim: str, warm: Warm, rft: Rft, tmp_path: Path) -> None:
    buffer = tmp_path / "buffer"
    process = start(buffer, warm)
    wait_for_step(buffer, 4, process)
    os.kill(pid_of(buffer, victim), signal.SIGKILL)
    output, _ = process.communicate(timeout=240)
    assert process.returncode != 0, output
    if victim in ("explorer", "pipeline", "trainer"):
        assert f"the {victim} of the run" in output
        assert "rft run --resume sort-grpo" in output
        assert "Traceback" not in output
    rft("run", "--resume", "--plain", "--buffer", buffer)
    assert_continuous(rft, buffer)
    if victim == "supervisor":
        # Its roles may even have done the last step before they noticed: a finished run is reported, not refused.
        again = rft("run", "--resume", "--plain", "--buffer", buffer).stdout
        assert "nothing is left to do" in again
        assert f"{STEPS} of {STEPS}" in again


def test_a_run_does_not_end_when_its_database_is_killed(warm: Warm, rft: Rft, tmp_path: Path) -> None:
    buffer = tmp_path / "buffer"
    process = start(buffer, warm)
    wait_for_step(buffer, 4, process)
    os.kill(pid_of(buffer, "postgres"), signal.SIGKILL)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert "the database was killed: it is started again" in output
    assert "Traceback" not in output
    assert_continuous(rft, buffer)


def test_a_run_ends_when_its_database_is_stopped(warm: Warm, rft: Rft, tmp_path: Path) -> None:
    buffer = tmp_path / "buffer"
    process = start(buffer, warm)
    wait_for_step(buffer, 4, process)
    rft("db", "stop", "--force", "--buffer", buffer)
    output, _ = process.communicate(timeout=240)
    assert process.returncode != 0, output
    assert "rft run --resume sort-grpo" in output
    assert "Traceback" not in output
    rft("run", "--resume", "--plain", "--buffer", buffer)
    assert_continuous(rft, buffer)


def test_a_run_goes_on_after_ctrl_c(warm: Warm, rft: Rft, tmp_path: Path) -> None:
    buffer = tmp_path / "buffer"
    process = start(buffer, warm)
    wait_for_step(buffer, 4, process)
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 130, output
    assert "go on with: rft run --resume sort-grpo" in output
    # Stopped in good order: what was trained is in a checkpoint.
    last = rows(
        buffer,
        "select max(trainer_step) as trained, (select max(trainer_step) from rft.checkpoint) as kept from rft.train_step",
    )[0]
    assert last["trained"] == last["kept"]
    rft("run", "--resume", "--plain", "--buffer", buffer)
    assert_continuous(rft, buffer)
