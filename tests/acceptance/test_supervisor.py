"""How `rft run` ends when a role does not stop, or fails after its work; and that it does not join another Ray cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rftdata.postgres.embedded import EmbeddedServer
from tests.support.command_line import Rft, rft_environment, rows
from tests.support.models import make_tiny_model
from tests.support.preloaded import Preloaded
from tests.support.waiting import PATIENCE_S, printed_by, wait_until, wait_until_ended

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CONFIG = """
run: {{name: supervised, seed: 1, stop_grace_s: 3}}
model: {{path: {model}}}
tasks: [{{name: t, source: "./tasks.py:questions"}}]
selector: {{type: shuffle}}
algorithm: {{name: sft, group_size: 1}}
explorer: {{engine: "./engines.py:Stubborn", workflow: demonstration, max_refill: 0, claim_groups: 64}}
trainer: {{batch_groups: 4, checkpoint_every: 2000, autocast: none}}
sync: {{offset: 8}}
sampling: {{max_staleness: 100}}
steps: 100000000
"""
TASKS = """
def questions():
    return ({"question": f"{n} + 1 =", "answer": str(n + 1)} for n in range(10_000))
"""
ENGINES = """
import time

from rftcore.engines.no_engine import NoEngine


class Stubborn(NoEngine):
    def close(self):
        time.sleep(600)


class Clumsy(NoEngine):
    def close(self):
        raise RuntimeError("it stumbled on the way out")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    make_tiny_model(tmp_path / "model")
    (tmp_path / "config.yaml").write_text(CONFIG.format(model=tmp_path / "model"))
    (tmp_path / "tasks.py").write_text(TASKS)
    (tmp_path / "engines.py").write_text(ENGINES)
    yield tmp_path
    if (tmp_path / "buffer" / "postgres").exists():
        EmbeddedServer(tmp_path / "buffer").stop()


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    overrides = [part for option in options for part in ([option] if option.startswith("--") else ["--set", option])]
    arguments = ["run", folder / "config.yaml", "--plain", "--buffer", folder / "buffer", *overrides]
    return Preloaded(
        arguments, env=rft_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip


def test_a_role_that_does_not_stop_after_ctrl_c_is_killed_and_the_run_counts_as_interrupted(
    folder: Path, rft: Rft
) -> None:
    process = start(folder)
    buffer = folder / "buffer"
    running = buffer / "postgres" / "postmaster.pid"
    wait_until(
        lambda: running.exists() and rows(buffer, "select 1 from rft.train_step limit 1"), "the first step",
        process=process, pause_s=0.5,
    )  # fmt: skip
    stacks = rft("status", "--stacks", "--buffer", buffer).stdout
    for role, function in (
        ("supervisor", "_supervise"),
        ("explorer", "in run"),
        ("pipeline", "main"),
        ("trainer", "_step"),
    ):
        assert function in stacks.partition(f"\n{role} ")[2], f"where is the {role}?\n{stacks}"
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, output
    assert "explorer did not stop within 3 s: killed" in output
    assert "ended before its work was done" not in output
    run = rows(buffer, "select status::text as status, outcome from rft.run")
    assert run == [{"status": "interrupted", "outcome": "stopped by a person"}]


def test_the_end_of_the_fork_server_ends_the_run_and_its_roles_which_are_resumed(folder: Path) -> None:
    process = start(folder, "explorer.engine=none")
    buffer = folder / "buffer"
    running = buffer / "postgres" / "postmaster.pid"
    wait_until(
        lambda: running.exists() and rows(buffer, "select 1 from rft.train_step limit 1"), "the first step",
        process=process, pause_s=0.5,
    )  # fmt: skip
    pids = {row["role"]: row["pid"] for row in rows(buffer, "select role::text as role, pid from rft.worker")}
    assert sorted(pids) == ["explorer", "pipeline", "supervisor", "trainer"] and pids.pop("supervisor") == process.pid
    [server] = {psutil.Process(pid).ppid() for pid in pids.values()}
    os.kill(server, signal.SIGKILL)
    output = printed_by(process)
    assert process.returncode == 1, output
    said = f"the fork server was killed by signal 9 (process {server}), and the roles ended with it"
    assert said in output and "rft run --resume supervised" in output and "Traceback" not in output
    wait_until_ended(pids.values())
    (step,) = rows(buffer, "select max(trainer_step) as last from rft.v_train_step")
    again = start(folder, "explorer.engine=none", f"steps={step['last'] + 3}", "--resume")
    output = printed_by(again)
    assert again.returncode == 0 and "finished" in output, output
    logs = {path.name for path in (buffer / "runs" / "supervised" / "logs").iterdir()}
    assert logs == {"explorer.log", "pipeline.log", "trainer.log"}
    stacks = {path.name for path in (buffer / "runs" / "supervised" / "stacks").glob("[0-9]*.txt")}
    assert stacks <= {f"{pid}.txt" for pid in pids.values()}, "a process that ends in good order removes its own"


def test_a_role_that_fails_when_the_run_has_finished_does_not_change_its_result(folder: Path) -> None:
    process = start(folder, "steps=2", "explorer.engine=./engines.py:Clumsy")
    output = printed_by(process)
    assert process.returncode == 0, output
    assert "warning: the run had finished when the explorer failed" in output and "stumbled" in output
    assert "2 of 2" in output, "the results are shown"
    assert rows(folder / "buffer", "select status::text as status, outcome from rft.run") == [
        {"status": "finished", "outcome": "2 steps done"}
    ]


def test_a_cluster_that_somebody_left_running_is_not_joined() -> None:
    program = "from rftcore.launch import cluster; print(cluster.start_cluster()); cluster.stop_cluster()"
    # Not pytest's folder: Ray's sockets are in it, and their paths must be short.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        # The file by which `ray start --head` announces its cluster; here the cluster no longer runs.
        current = Path(folder) / "ray" / "ray_current_cluster"
        current.parent.mkdir()
        current.write_text("127.0.0.1:9")
        environment = {**rft_environment(), "RAY_TMPDIR": folder}
        environment.pop("RAY_ADDRESS", None)
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    assert "a local Ray cluster" in done.stdout, done.stderr[-2000:]
