"""Ctrl-C, or kill -9 of any one process, then `rft run --resume`: one continuous curve to the planned number of steps.

A single run survives all of it: each test continues where the previous one stopped, and starts the run if there is none. The run has no end in sight
until the last test gives it one, so that no life finishes it before it is hit.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import rftdata
from rftdata.maintenance.verification import verify
from rftdata.postgres.embedded import EmbeddedServer
from tests.support.command_line import EXAMPLE, Rft, report, rft_environment, rows
from tests.support.preloaded import Preloaded
from tests.support.small_runs import FEW_TASKS
from tests.support.waiting import PATIENCE_S, wait_until, wait_until_ended
from tests.support.warm_up import Warm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

OVERRIDES = (
    *FEW_TASKS,
    "explorer.engine=transformers",
    "explorer.engine_args={dtype: float32, context_length: 64}",
    "trainer.checkpoint_every=3",
    "eval.every=6",
    "trainer.batch_groups=4",
    "steps=1000000",
    "eval.test=[]",
    "explorer.max_refill=64",
)


@dataclass
class Walk:
    """The run: its buffer, and the process of its present life."""

    buffer: Path
    options: list[str]
    process: subprocess.Popen[bytes] | None = None

    @property
    def output(self) -> Path:
        """What the present life, or the last one, printed."""
        return self.buffer.parent / "output"

    def begin_or_resume(self) -> subprocess.Popen[bytes]:
        """The process of the run, started where the last one ended; it has done two steps more."""
        if self.process is None or self.process.poll() is not None:
            resumed = self.has_begun
            arguments = ["--resume"] if resumed else [EXAMPLE / "grpo.yaml", *self.options]
            command = ["run", *arguments, "--plain", "--buffer", self.buffer]
            with self.output.open("wb") as output:
                self.process = Preloaded(
                    command, env=rft_environment(), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
                )
        done = self.num_steps()
        # A look opens the buffer, which takes a tenth of the pause.
        self.wait_until(lambda: self.num_steps() >= done + 2, "two steps more", pause_s=0.5)
        return self.process

    def wait_until(self, holds: Callable[[], bool], what: str, pause_s: float) -> None:
        """Wait for something while the present life goes on."""

        def holds_yet() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, f"the run ended before {what}:\n{self.output.read_text()}"
            return holds()

        wait_until(holds_yet, what, pause_s=pause_s)

    @property
    def has_begun(self) -> bool:
        return (self.buffer / "postgres").exists()

    def num_steps(self) -> int:
        """Steps that all lives have done, those included that a later one did again."""
        if not (self.buffer / "host").exists():  # before that its server is being made
            return 0
        return int(rows(self.buffer, "select count(*) as n from rft.train_step")[0]["n"])

    def pid_of(self, victim: str) -> int:
        query = f"select pid from rft.worker where role = '{victim}' and stopped_at is null order by worker_id desc"
        return int(rows(self.buffer, query)[0]["pid"])

    def end(self) -> tuple[int, str]:
        """Exit code and output of the present life, once it ends."""
        assert self.process is not None
        process, self.process = self.process, None
        return process.wait(timeout=PATIENCE_S), self.output.read_text()

    def kill(self) -> None:
        """kill -9 of `rft run`, the supervisor; its roles end by themselves."""
        os.kill(self.pid_of("supervisor"), signal.SIGKILL)
        code, output = self.end()
        assert code != 0, output


@pytest.fixture(scope="module")
def walk(warm: Warm, server_folders: Path) -> Iterator[Walk]:
    options = [part for override in (*OVERRIDES, f"model.path={warm.model}") for part in ("--set", override)]
    (folder := server_folders / "walk").mkdir()
    walk = Walk(folder / "buffer", options)
    yield walk
    if walk.process is not None:
        walk.process.kill()
        walk.process.wait()
    EmbeddedServer(walk.buffer).stop()


def test_a_run_does_not_end_when_its_database_is_killed(walk: Walk) -> None:
    process = walk.begin_or_resume()
    os.kill(int((walk.buffer / "postgres" / "postmaster.pid").read_text().split()[0]), signal.SIGKILL)
    # The test does not open the buffer until then, because that would start the database, too.
    said = "the database was killed: it is started again"
    walk.wait_until(lambda: said in walk.output.read_text(), "the database is started again", pause_s=0.2)
    assert walk.begin_or_resume() is process, "continue it by itself"


@pytest.mark.parametrize("victim", ["explorer", "pipeline"])
def test_a_run_does_not_end_after_kill_9_of_the(victim: str, walk: Walk) -> None:
    process = walk.begin_or_resume()
    pid = walk.pid_of(victim)
    os.kill(pid, signal.SIGKILL)
    assert walk.begin_or_resume() is process, "continue it by itself"
    said = f"the {victim} was killed by signal 9, possibly for lack of memory (process {pid}); it is started again in 1 s (1)"
    assert said in walk.output.read_text()
    assert walk.pid_of(victim) != pid


def test_a_run_continues_after_kill_9_of_the_trainer(walk: Walk) -> None:
    walk.begin_or_resume()
    os.kill(walk.pid_of("trainer"), signal.SIGKILL)
    code, output = walk.end()
    assert code != 0, output
    assert "the trainer of the run" in output
    assert "rft run --resume sort-grpo" in output
    assert "Traceback" not in output


def test_a_run_ends_when_its_database_is_stopped(walk: Walk, rft: Rft) -> None:
    walk.begin_or_resume()
    rft("db", "stop", "--force", "--buffer", walk.buffer)
    code, output = walk.end()
    assert code != 0, output
    assert "rft run --resume sort-grpo" in output
    assert "Traceback" not in output


def test_a_run_continues_after_ctrl_c(walk: Walk) -> None:
    process = walk.begin_or_resume()
    os.kill(process.pid, signal.SIGINT)
    code, output = walk.end()
    assert code == 130, output
    assert "continue with: rft run --resume sort-grpo" in output
    # Stopped in good order: what was trained is in a checkpoint.
    last = rows(
        walk.buffer,
        "select max(trainer_step) as trained, (select max(trainer_step) from rft.checkpoint) as kept from rft.v_train_step",
    )[0]
    assert last["trained"] == last["kept"]


def test_a_run_continues_after_kill_9_of_the_supervisor(walk: Walk) -> None:
    walk.begin_or_resume()
    walk.kill()
    assert walk.begin_or_resume().poll() is None


def test_the_last_life_reaches_the_planned_step_on_one_continuous_curve(walk: Walk, rft: Rft) -> None:
    walk.begin_or_resume()
    roles = rows(walk.buffer, "select pid from rft.worker where stopped_at is null and role <> 'supervisor'")
    walk.kill()
    wait_until_ended(row["pid"] for row in roles)  # until then they may do further steps
    curve = "select trainer_step from rft.v_train_step order by trainer_step"
    last = rows(walk.buffer, curve)[-1]["trainer_step"] + 4
    rft("run", "--resume", "--plain", "--buffer", walk.buffer, "--set", f"steps={last}")
    result = report(rft, walk.buffer, "sort-grpo")
    assert result["status"] == "finished"
    assert result["steps"]["done"] == last
    assert [row["trainer_step"] for row in rows(walk.buffer, curve)] == list(range(1, last + 1))
    twice = """select experience_id from rft.v_consumption group by experience_id having count(*) > 1"""
    assert rows(walk.buffer, twice) == []
    with rftdata.open(str(walk.buffer)) as opened:
        assert list(verify(opened)) == []
    again = rft("run", "--resume", "--plain", "--buffer", walk.buffer).stdout
    assert "nothing is left to do" in again
    assert f"{last} of {last}" in again
