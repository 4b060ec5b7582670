"""A signal to `rft run`, alone or to its whole process group, always leaves an interrupted run that can be resumed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import signal
import subprocess
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rftcore.launch.signals import SAME_S
from rftdata.postgres.embedded import EmbeddedServer
from tests.support.command_line import rft_command, rft_environment, rows
from tests.support.models import make_tiny_model
from tests.support.preloaded import Preloaded
from tests.support.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

CONFIG = """
run: {{name: supervised, seed: 1}}
model: {{path: {model}}}
tasks: [{{name: t, source: "./tasks.py:questions"}}]
selector: {{type: shuffle}}
algorithm: {{name: sft, group_size: 1}}
explorer: {{engine: none, workflow: demonstration, max_refill: 0, claim_groups: 64}}
trainer: {{batch_groups: 4, checkpoint_every: 2000, autocast: none}}
sync: {{offset: 8}}
sampling: {{max_staleness: 100}}
steps: 100000000
"""
TASKS = """
import time


def questions():
    return ({"question": f"{n} + 1 =", "answer": str(n + 1)} for n in range(100_000))


def slow():
    print("the tasks are read", flush=True)
    while True:  # Python calls no handler for a signal that arrives just before it sleeps until the sleep ends
        time.sleep(0.1)
    yield {}
"""
ENGINES = """
import time

from rftcore.engines.no_engine import NoEngine


class Stubborn(NoEngine):
    def close(self):
        time.sleep(600)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("signals")
    make_tiny_model(folder / "model", num_layers=1)
    (folder / "config.yaml").write_text(CONFIG.format(model=folder / "model"))
    (folder / "tasks.py").write_text(TASKS)
    (folder / "engines.py").write_text(ENGINES)
    yield folder
    if (folder / "buffer" / "postgres").exists():
        EmbeddedServer(folder / "buffer").stop()


def arguments(folder: Path, *more: object) -> list[object]:
    """Return the arguments of `rft run`, which resume the run if it is stored."""
    resumed = ["--resume"] if (folder / "buffer" / "postgres").exists() else []
    return ["run", folder / "config.yaml", *resumed, "--buffer", folder / "buffer", *more]


def start(folder: Path, *more: object) -> subprocess.Popen[str]:
    return Preloaded(
        arguments(folder, "--plain", *more),
        env=rft_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def num_steps(folder: Path) -> int:
    if not (folder / "buffer" / "postgres" / "postmaster.pid").exists():
        return 0
    return int(rows(folder / "buffer", "select count(*) as n from rft.train_step")[0]["n"])


def wait_for_steps(folder: Path, process: subprocess.Popen[str]) -> None:
    """Wait until the run has done two further steps."""
    before = num_steps(folder)
    wait_until(lambda: num_steps(folder) >= before + 2, "two steps more", process=process, pause_s=0.5)


def wait_for_line(process: subprocess.Popen[str], part: str) -> str:
    """Return what the process prints up to a line."""
    assert process.stdout is not None
    read = ""
    for line in process.stdout:
        read += line
        if part in line:
            return read
    raise AssertionError(f"it ended without {part!r}:\n{read}")


def assert_interrupted(folder: Path, process: subprocess.Popen[str], number: signal.Signals) -> str:
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + number, output
    for unwanted in ("Traceback", "ActorDied", "raylet", "warning"):
        assert unwanted not in output, output
    outcome = "stopped by a person" if number is signal.SIGINT else f"stopped by {number.name}"
    state = rows(folder / "buffer", "select status::text as status, outcome from rft.run")
    assert state == [{"status": "interrupted", "outcome": outcome}]
    assert rows(folder / "buffer", "select * from rft.worker where stopped_at is null") == []
    return output


def assert_kept(folder: Path) -> None:
    """Assert that the run stopped in good order: no role failed, and the trainer stored what it had trained."""
    trained = (
        "select max(trainer_step) as step, (select max(trainer_step) from rft.checkpoint) as kept from rft.train_step"
    )
    assert len({*rows(folder / "buffer", trained)[0].values()}) == 1
    assert rows(folder / "buffer", "select error from rft.worker where error is not null") == []


@pytest.mark.parametrize(
    ("number", "whole_group"),
    [(signal.SIGTERM, True), (signal.SIGINT, True), (signal.SIGTERM, False), (signal.SIGINT, False)],
)
def test_a_signal_interrupts_the_run_in_good_order(folder: Path, number: signal.Signals, whole_group: bool) -> None:
    process = start(folder)
    wait_for_steps(folder, process)
    os.kill(process.pid, number)
    if whole_group:  # `timeout`, too, signals the process and then its group
        os.killpg(process.pid, number)
    output = assert_interrupted(folder, process, number)
    assert "continue with: rft run --resume supervised" in output
    assert_kept(folder)


def test_a_terminal_that_is_closed_interrupts_the_run_in_good_order(folder: Path) -> None:
    terminal, end = os.openpty()
    process = subprocess.Popen(
        rft_command(*arguments(folder)),
        env=rft_environment(),
        stdin=end,
        stdout=end,
        stderr=end,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(end)
    closes = threading.Event()
    drain = threading.Thread(target=drain_terminal, args=(terminal, closes), daemon=True)
    drain.start()
    wait_for_steps(folder, process)  # type: ignore[arg-type]
    closes.set()
    drain.join()
    os.close(terminal)
    assert process.wait(timeout=PATIENCE_S) == 128 + signal.SIGHUP
    state = rows(folder / "buffer", "select status::text as status, outcome from rft.run")
    assert state == [{"status": "interrupted", "outcome": "stopped by SIGHUP"}]
    assert_kept(folder)


def drain_terminal(terminal: int, closes: threading.Event) -> None:
    """Read what a terminal shows until it is to be closed, so that the writer does not wait."""
    with contextlib.suppress(OSError):
        while not closes.is_set():
            if select.select([terminal], [], [], 0.1)[0]:
                os.read(terminal, 65536)


def test_a_signal_before_the_roles_are_placed_interrupts_the_run(folder: Path) -> None:
    process = start(folder)
    read = wait_for_line(process, "threads")  # what follows is the start of the cluster
    os.killpg(process.pid, signal.SIGTERM)
    output = assert_interrupted(folder, process, signal.SIGTERM)
    assert "continue with: rft run --resume supervised" in read + output


def test_a_signal_before_the_run_is_stored_leaves_none(folder: Path) -> None:
    before = rows(folder / "buffer", "select count(*) as n from rft.run")
    change = "tasks=[{name: slow, source: './tasks.py:slow'}]"
    options = ["--plain", "--buffer", folder / "buffer", "--set", change, "--set", "run.name=slow"]
    process = Preloaded(
        ["run", folder / "config.yaml", *options],
        env=rft_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    wait_for_line(process, "the tasks are read")
    os.killpg(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 143
    assert output.strip() == "stopped by SIGTERM before the run began"
    assert rows(folder / "buffer", "select count(*) as n from rft.run") == before


def test_a_signal_to_every_process_ray_included_interrupts_the_run(folder: Path) -> None:
    process = start(folder)
    wait_for_steps(folder, process)
    for pid in [*descendants(process.pid), process.pid]:  # as systemd and batch systems do
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 143, output
    assert "Traceback" not in output and "continue with: rft run --resume supervised" in output, output
    state = rows(folder / "buffer", "select status::text as status, outcome from rft.run")
    assert state == [{"status": "interrupted", "outcome": "stopped by SIGTERM"}]


def descendants(pid: int) -> list[int]:
    """Return the children of a process, and theirs."""
    children = [
        int(folder.name)
        for folder in Path("/proc").iterdir()
        if folder.name.isdecimal() and (stat := read_stat(folder)) and int(stat[1]) == pid
    ]
    return [found for child in children for found in (child, *descendants(child))]


def read_stat(folder: Path) -> list[str]:
    try:
        return (folder / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def test_a_second_signal_ends_the_roles_at_once(folder: Path) -> None:
    process = start(folder, "--set", "explorer.engine=./engines.py:Stubborn")
    wait_for_steps(folder, process)
    os.killpg(process.pid, signal.SIGTERM)
    wait_for_line(process, "asked to stop")
    time.sleep(SAME_S + 0.5)
    os.killpg(process.pid, signal.SIGTERM)
    output = assert_interrupted(folder, process, signal.SIGTERM)
    # On a busy machine others have not stopped either.
    assert re.search(r"explorer.* did not stop yet: killed", output)
