"""Roles of one machine: their GPUs, and the reports of the fork server about their processes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rftcore.config.run import RunConfig
from rftcore.launch.local_processes.fork_server import ForkServer
from rftcore.launch.local_processes.launcher import devices_of
from rftcore.run.placement import Machine, place
from rftdata.processes import process_lives
from tests.support.waiting import PATIENCE_S, wait_until


def config(buffer: str | Path, **sections: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "r"},
            "buffer": {"uri": str(buffer)},
            "model": {"path": "m"},
            "algorithm": {"name": "grpo"},
            "steps": 1,
            "tasks": [{"name": "t", "source": "t.jsonl"}],
            "trainer": {},
            "explorer": {},
            **sections,
        }
    )


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, {"explorer 0": "0,1", "explorer 1": "2,3", "trainer": "4,5,6"}),
        ("7, 5,3,1,GPU-a,2,0", {"explorer 0": "7,5", "explorer 1": "3,1", "trainer": "GPU-a,2,0"}),
    ],
)
def test_each_role_sees_its_own_gpus_of_those_that_are_visible(
    tmp_path: Path, visible: str | None, expected: dict[str, str]
) -> None:
    explorer = {"num_explorers": 2, "tensor_parallel_size": 2}
    placement = place(config(tmp_path, explorer=explorer, trainer={"num_gpus": 3}), [Machine("here", 7)])
    assert devices_of(placement, visible) == expected


def test_roles_that_share_a_gpu_see_the_same_gpu(tmp_path: Path) -> None:
    placement = place(config(tmp_path, explorer={"num_explorers": 3}), [Machine("here", 2)], engine_share=0.3)
    devices = devices_of(placement, None)
    assert sorted(devices) == ["explorer 0", "explorer 1", "explorer 2", "trainer"]
    assert {devices[role] for role in devices} == {"0", "1"}
    assert all(len({devices[role] for role in bundle.roles}) == 1 for bundle in placement.bundles)


# In a process of its own, since what forks must have computed nothing, and a test's process has.
ROLE = """
import json, sys
from pathlib import Path
from rftcore.config.run import RunConfig
from rftcore.launch.local_processes.fork_server import ForkServer, Started
from rftcore.launch.launcher import RoleTask

config, log, action = RunConfig.model_validate(json.loads(sys.argv[1])), Path(sys.argv[2]), sys.argv[3]
server = ForkServer([], {})
server.start(3, RoleTask("pipeline", "pipeline", config, "r", {}, {}), log)
if action == "kill":
    server.kill(3)
events = []
while len(events) < 2:
    events.extend(server.events(1.0))
server.close()
started, ended = events
assert isinstance(started, Started) and started.key == ended.key == 3 and started.pid != server.pid
print(json.dumps([ended.status, type(ended.error).__name__, str(ended.error)]))
"""


def role_in_a_new_process(buffer: str | Path, log: Path, action: str = "wait") -> list[Any]:
    """Return status and error of a pipeline worker."""
    command = [sys.executable, "-c", ROLE, config(buffer).model_dump_json(), log, action]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_error_of_a_role_reaches_the_supervisor_and_its_output_the_log(tmp_path: Path) -> None:
    broken, log = tmp_path / "a-file-instead-of-a-folder", tmp_path / "logs" / "pipeline.log"
    broken.write_text("")
    status, error, text = role_in_a_new_process(broken, log)
    assert status == 1 and error == "BufferUnavailableError" and str(broken) in text
    assert re.fullmatch(r"== pipeline: process \d+, [^\n]+ ==\n", log.read_text()), "the supervisor reports the error"


def test_a_role_works_without_a_writable_log(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file where the folder should be")
    status, error, _ = role_in_a_new_process(tmp_path / "logs", tmp_path / "logs" / "pipeline.log")
    assert status == 1 and error == "BufferUnavailableError"


def test_a_role_can_be_killed_before_it_is_forked(tmp_path: Path) -> None:
    with socket.socket() as silent:  # a database that never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        uri = f"postgresql://me@127.0.0.1:{silent.getsockname()[1]}/rft"
        status, error, _ = role_in_a_new_process(uri, tmp_path / "pipeline.log", "kill")
    assert status == -signal.SIGKILL and error == "NoneType"


NO_PROCESS = """
import errno, os, sys
from pathlib import Path
from rftcore.launch.launcher import RoleTask
from rftcore.launch.local_processes.fork_server import ForkServer

this, fork = os.getpid(), os.fork

def no_fork():
    if os.getpid() != this:
        raise OSError(errno.EAGAIN, "no process is left")
    return fork()

def no_pidfd(pid):
    raise OSError(errno.EMFILE, f"no file is left for {pid}")

if sys.argv[1] == "fork":
    os.fork = no_fork
else:
    os.pidfd_open = no_pidfd
server = ForkServer([], {})
server.start(3, RoleTask("pipeline", "pipeline", None, "r", {}, {}), Path(os.devnull))
while not (events := server.events(1.0)):
    pass
[ended] = events
print(ended.key, ended.status, ended.error)
server.close()
"""


@pytest.mark.parametrize("failing", ["fork", "pidfd_open"])
def test_a_role_that_cannot_be_forked_is_reported_as_ended(failing: str) -> None:
    command = [sys.executable, "-c", NO_PROCESS, failing]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("3 1 [Errno ") and "is left" in done.stdout
    if failing == "pidfd_open":
        assert not process_lives(int(done.stdout.rsplit(maxsplit=1)[-1]))


@pytest.fixture
def server() -> Iterator[ForkServer]:
    server = ForkServer([], {})
    yield server
    server.close()


def test_roles_ignore_signals_that_the_supervisor_receives_too_and_a_kill_is_reported(server: ForkServer) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(server.pid, number)
    wait_until(lambda: os.getsid(server.pid) == server.pid, "a session of its own")
    assert server.events(0.0) == [] and server.exit_status is None
    os.kill(server.pid, signal.SIGKILL)
    wait_until(lambda: server.exit_status == -signal.SIGKILL, "the end of the server")
    assert server.events(PATIENCE_S) == []


def test_a_closed_server_has_ended() -> None:
    server = ForkServer(["json"], {})
    server.close()
    assert server.exit_status is not None and not process_lives(server.pid)


def test_a_server_that_is_suspended_is_closed_at_once(server: ForkServer) -> None:
    os.kill(server.pid, signal.SIGSTOP)
    server.close()
    assert server.exit_status == -signal.SIGKILL


def test_a_module_that_cannot_be_imported_does_not_end_the_server() -> None:
    server = ForkServer(["rftcore.does_not_exist"], {})
    wait_until(lambda: os.getsid(server.pid) == server.pid, "a session of its own")
    assert server.events(0.0) == [] and server.exit_status is None and server.last_line() == ""
    server.close()


# Its role is one that imports nothing itself and fails at once, so that only the fork server's part takes time.
PRELOADED = """
import json, os, pickle, sys, time
from pathlib import Path
from rftcore.config.run import RunConfig
from rftcore.launch.launcher import Preparation, RoleTask
from rftcore.launch.local_processes.children import Preload
from rftcore.launch.local_processes.fork_server import ForkServer, Started
from rftdata.processes import process_lives

config, folder, preloads = RunConfig.model_validate(json.loads(sys.argv[1])), Path(sys.argv[2]), json.loads(sys.argv[3])
server = ForkServer(sys.argv[5:], {})

def lives():
    return process_lives(int((folder / "pid").read_text()))

preparation = pickle.dumps(Preparation(("slow_module",)))
server.preload([Preload("pipeline", {"WHICH": which}, preparation) for which in preloads])
(folder / "asked").touch()
while not (folder / "pid").exists():
    time.sleep(0.01)
if "other" in preloads:
    server.preload([])
while sys.argv[4] == "ends" and lives():
    time.sleep(0.01)
server.start(3, RoleTask("pipeline", "pipeline", config, "r", {}, {"WHICH": "this"}), folder / "log")
server.preload([])
(folder / "started").touch()
events = []
while len(events) < 2:
    events.extend(server.events(1.0))
    (folder / "given").touch()
server.close()
print(events[0].pid, int((folder / "pid").read_text()), lives(), events[1].status, type(events[1].error).__name__)
"""
SLOW_MODULE = """
import os, time
print("slow_module for", os.environ["WHICH"])
with open({file!r} + ".new", "w") as pid:
    pid.write(str(os.getpid()))
os.replace({file!r} + ".new", {file!r})
{then}
"""


def preloaded(
    folder: Path, which: str, then: str = "time.sleep(0.5)", *, ends: bool, modules: Sequence[str] = ()
) -> tuple[list[str], str]:
    """Return what the program reports of a role that a process was preloaded for, and the role's log.

    Args:
        then: what the module does last.
        ends: whether the role is started after the end of the process.
        modules: what the server imports.
    """
    (folder / "slow_module.py").write_text(SLOW_MODULE.format(file=str(folder / "pid"), then=then))
    (folder / "broken").write_text("a file where the buffer should be")
    text = config(folder / "broken").model_dump_json()
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    command = [
        sys.executable,
        "-c",
        PRELOADED,
        text,
        str(folder),
        json.dumps([which]),
        "ends" if ends else "waits",
        *modules,
    ]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split(), (folder / "log").read_text()


def test_a_process_that_began_with_its_imports_gets_the_role_with_the_same_environment(tmp_path: Path) -> None:
    (role, process, lives, *end), log = preloaded(tmp_path, "this", ends=False)
    assert role == process and [lives, *end] == ["False", "1", "BufferUnavailableError"]
    header, printed = log.splitlines()
    assert header.startswith(f"== pipeline: process {role}, ") and printed == "slow_module for this"


def test_a_process_begins_with_its_imports_while_the_server_imports_what_others_need(tmp_path: Path) -> None:
    waits = "import pathlib, time\nwhile not pathlib.Path({!r}).exists():\n    time.sleep(0.01)"
    (tmp_path / "of_all.py").write_text(waits.format(str(tmp_path / "asked")))
    (tmp_path / "of_others.py").write_text(waits.format(str(tmp_path / "started")))
    (role, process, *_), log = preloaded(tmp_path, "this", ends=False, modules=["of_all", "of_others"])
    assert role == process and log.splitlines()[1:] == ["slow_module for this"]


def test_a_process_that_is_not_needed_is_ended_and_the_role_gets_another(tmp_path: Path) -> None:
    (role, process, lives, *end), log = preloaded(tmp_path, "other", ends=True)
    assert role != process and [lives, *end] == ["False", "1", "BufferUnavailableError"] and "slow" not in log


def test_what_a_process_printed_that_crashes_in_its_imports_with_its_task_is_in_the_log(tmp_path: Path) -> None:
    crash = (
        f"while not pathlib.Path({str(tmp_path / 'given')!r}).exists():\n    time.sleep(0.01)\nos.kill(os.getpid(), 11)"
    )
    (role, process, lives, *end), log = preloaded(tmp_path, "this", then=f"import pathlib\n{crash}", ends=False)
    assert role == process and [lives, *end] == ["False", "-11", "NoneType"]
    assert log.splitlines() == [
        f"== printed by process {role} before it had this log ==",
        "slow_module for this",
    ]


def test_a_process_that_was_killed_by_what_it_imports_is_replaced_for_the_role(tmp_path: Path) -> None:
    (role, process, lives, *end), log = preloaded(tmp_path, "this", then="os.kill(os.getpid(), 9)", ends=True)
    assert role != process and [lives, *end] == ["False", "1", "BufferUnavailableError"] and "slow" not in log
