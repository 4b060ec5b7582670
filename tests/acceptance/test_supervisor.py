"""`rft run` ends in good order when a role does not stop, or fails after its work, and ends a local Ray cluster completely."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import psycopg
import pytest
import yaml

from rftdata.postgres.embedded import EmbeddedServer
from rftdata.processes import pid_space
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
import os
import time


def questions():
    return ({"question": f"{n} + 1 =", "answer": str(n + 1)} for n in range(10_000))


def forking():
    if os.fork() == 0:  # it has the files of `rft run`, as a library's helper may
        time.sleep(1000)
        os._exit(0)
    return questions()
"""
ENGINES = """
import os
import subprocess
import time
from pathlib import Path

from rftcore.engines.no_engine import NoEngine


class Stubborn(NoEngine):
    def close(self):
        child = subprocess.Popen(["sleep", "1000"])
        Path(__file__).with_name("child").write_text(str(child.pid))
        time.sleep(600)


class Stumbled(Exception):
    pass


class Leaves(NoEngine):
    def __init__(self, *arguments, **options):
        os._exit(0)


class Waits(NoEngine):
    def close(self):
        while not Path(__file__).with_name("go").exists():
            time.sleep(0.05)


class Clumsy(NoEngine):
    def close(self):
        raise Stumbled("on the way out")
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
        arguments,
        env=rft_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for_a_step(folder: Path, process: subprocess.Popen[str]) -> dict[str, int]:
    """Return the process id of each role once a step is done."""
    buffer = folder / "buffer"
    running = buffer / "postgres" / "postmaster.pid"
    wait_until(
        lambda: running.exists() and rows(buffer, "select 1 from rft.train_step limit 1"),
        "the first step",
        process=process,
        pause_s=0.5,
    )
    found = rows(buffer, "select role::text as role, pid from rft.worker where stopped_at is null")
    return {row["role"]: row["pid"] for row in found if row["role"] != "supervisor"}


def test_a_role_that_does_not_stop_after_ctrl_c_is_killed_and_the_run_counts_as_interrupted(
    folder: Path, rft: Rft
) -> None:
    process = start(folder)
    buffer = folder / "buffer"
    wait_for_a_step(folder, process)
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
    wait_until_ended([int((folder / "child").read_text())])  # what it had started ends with it
    assert "ended before its work was done" not in output
    run = rows(buffer, "select status::text as status, outcome from rft.run")
    assert run == [{"status": "interrupted", "outcome": "stopped by a person"}]


def test_a_run_ends_with_its_fork_server_and_can_be_resumed(folder: Path) -> None:
    process = start(folder, "explorer.engine=none")
    buffer = folder / "buffer"
    pids = wait_for_a_step(folder, process)
    assert sorted(pids) == ["explorer", "pipeline", "trainer"]
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
    stacks = {path.name for path in (buffer / "runs" / "supervised" / "stacks").glob("*[0-9].txt")}
    assert stacks <= {f"{socket.gethostname()}-{pid_space()}-{pid}.txt" for pid in pids.values()}, (
        "a process that ends in good order removes its own"
    )


def test_keep_running_resumes_a_run_whose_process_was_killed(folder: Path) -> None:
    process = start(folder, "explorer.engine=none", "trainer.checkpoint_every=1", "--keep-running")
    pids = wait_for_a_step(folder, process)
    (run,) = psutil.Process(process.pid).children()
    run.kill()
    wait_until_ended(pids.values())
    buffer = folder / "buffer"
    attempts = "select 1 from rft.train_step join rft.run_attempt using (attempt_id) where parent_attempt_id is not null limit 1"
    wait_until(lambda: rows(buffer, attempts), "a step of the resumed run", process=process, pause_s=0.5)
    os.kill(process.pid, signal.SIGTERM)
    output = printed_by(process)
    assert process.returncode == 143, output
    assert "the run supervised ended by signal 9 after step" in output and "--keep-running resumes it in 5 s" in output
    run_row = rows(buffer, "select status::text as status, outcome from rft.run")
    assert run_row == [{"status": "interrupted", "outcome": "stopped by SIGTERM"}]


def test_roles_end_with_rft_run_even_if_another_process_holds_its_files(folder: Path) -> None:
    process = start(folder, "explorer.engine=none", "tasks=[{name: t, source: './tasks.py:forking'}]")
    pids = wait_for_a_step(folder, process)
    forked = {child.pid for child in psutil.Process(process.pid).children(recursive=True)}
    process.kill()
    process.wait()
    try:
        wait_until_ended(pids.values())
    finally:
        for pid in forked - {*pids.values()}:
            if psutil.pid_exists(pid):
                os.kill(pid, signal.SIGKILL)
    assert process.stdout is not None
    process.stdout.close()


def test_a_run_ends_although_its_fork_server_does_not_answer(folder: Path) -> None:
    process = start(folder, "explorer.engine=none")
    pids = wait_for_a_step(folder, process)
    os.kill(psutil.Process(pids["trainer"]).ppid(), signal.SIGSTOP)
    os.kill(pids["explorer"], signal.SIGSTOP)  # and a role that cannot stop by itself
    process.send_signal(signal.SIGTERM)
    output = printed_by(process)
    assert process.returncode == 128 + signal.SIGTERM and "rft run --resume supervised" in output, output
    wait_until_ended(pids.values())


def test_roles_are_killed_although_a_lock_is_not_released(folder: Path) -> None:
    """A role that is suspended within a transaction holds such a lock, and the request to stop the run waits for it."""
    process = start(folder, "explorer.engine=none")
    pids = wait_for_a_step(folder, process)
    with psycopg.connect(EmbeddedServer(folder / "buffer").uri) as connection:
        connection.execute("SELECT FROM rft.run FOR UPDATE")
        os.kill(pids["explorer"], signal.SIGSTOP)  # a role that cannot stop by itself
        process.send_signal(signal.SIGTERM)
        wait_until_ended([pids["explorer"]])
    output = printed_by(process)
    assert process.returncode == 128 + signal.SIGTERM and "did not stop within 3 s: killed" in output, output


def test_a_role_that_keeps_exiting_without_an_error_is_restarted_until_the_run_ends(folder: Path) -> None:
    process = start(folder, "explorer.engine=./engines.py:Leaves")
    output = printed_by(process)
    assert process.returncode == 1, output
    assert "the explorer ended with exit code 0 before the run had ended; it is started again in 1 s (1)" in output
    assert "4 processes in a row ended before they had finished anything" in output


def test_no_stage_starts_after_a_signal_at_the_end_of_the_stage_before(folder: Path) -> None:
    config = yaml.safe_load((folder / "config.yaml").read_text()) | {"steps": 2}
    config["explorer"]["engine"] = "./engines.py:Waits"
    config["stages"] = [{"name": "one"}, {"name": "two"}]
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    process = start(folder)
    buffer = folder / "buffer"
    finished = "select 1 from rft.run where status = 'finished'"
    running = buffer / "postgres" / "postmaster.pid"
    wait_until(
        lambda: running.exists() and rows(buffer, finished), "the end of the first stage", process=process, pause_s=0.5
    )
    process.send_signal(signal.SIGTERM)
    (folder / "go").touch()
    output = printed_by(process)
    assert process.returncode == 128 + signal.SIGTERM and "before stage 2 of 2; --resume continues there" in output, (
        output
    )
    assert rows(buffer, "select count(*) as n from rft.run") == [{"n": 1}]


def test_a_role_that_fails_when_the_run_has_finished_does_not_change_its_result(folder: Path) -> None:
    process = start(folder, "steps=2", "explorer.engine=./engines.py:Clumsy")
    output = printed_by(process)
    assert process.returncode == 0, output
    assert (
        "warning: the run had finished when the explorer failed" in output
        and "Stumbled: on the way out; its log is" in output
    )
    assert "2 of 2" in output, "the results are shown"
    assert rows(folder / "buffer", "select status::text as status, outcome from rft.run") == [
        {"status": "finished", "outcome": "2 steps done"}
    ]


def run_with_ray(program: str, folder: str) -> str:
    """Run a program whose clusters have their files in a folder; return what it prints.

    Args:
        folder: not pytest's, because Ray's sockets are in it, and their paths must be short.
    """
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
    assert not done.returncode, done.stderr[-2000:]
    return done.stdout


def test_a_cluster_that_was_left_running_is_not_joined() -> None:
    program = "from rftcore.launch.ray_cluster import cluster; print(cluster.start_cluster()); cluster.stop_cluster()"
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        # The file by which `ray start --head` announces its cluster; here the cluster no longer runs.
        current = Path(folder) / "ray" / "ray_current_cluster"
        current.parent.mkdir()
        current.write_text("127.0.0.1:9")
        assert "a local Ray cluster" in run_with_ray(program, folder)


def test_no_process_of_a_local_cluster_outlives_it_after_its_head_was_killed() -> None:
    program = """
import psutil
from rftcore.launch.ray_cluster import cluster

cluster.start_cluster()
processes = psutil.Process().children(recursive=True)
head = next(process for process in processes if process.name() == "gcs_server")
head.kill()
head.wait()
cluster.stop_cluster()
_, left = psutil.wait_procs(processes, timeout=30)  # agents that are not killed stay for 60 s
print(len(processes), [process.name() for process in left])
"""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        assert run_with_ray(program, folder) == "4 []\n"
