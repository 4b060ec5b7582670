"""The fork of an explorer that becomes the process of its engine core: what it begins with, and how it ends. Programs of their own fork, as explorers do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rftdata.processes import process_lives
from tests.support.waiting import PATIENCE_S, wait_until

PROGRAM = """
import json, os, signal, sys, threading, time
from rftcore.engines import core_fork
from rftcore.engines.core_fork import ForkContext, fork_core, take_fork

def work(connection):
    print("printed by the process", flush=True)
    found = {"pid": os.getpid(), "session": os.getsid(0), "name": core_fork.process.current_process().name, "folder": os.getcwd()}
    found |= {name: os.environ.get(name) for name in ("SET_LATER", "REMOVED_LATER", "CHANGED_LATER")}
    found |= {"threads": threading.active_count(), "inherits": core_fork.__dict__.get("MARK"), "imported": "colorsys" in sys.modules}
    connection.send(found)
    connection.recv()
    sys.exit(7)

def waiting():
    return core_fork._waiting

def start():
    ours, theirs = ForkContext().Pipe()
    process = ForkContext().Process(target=work, args=(theirs,), name="EngineCore")
    process.start()
    theirs.close()
    return process, ours

def main():
    core_fork.MARK = "of the explorer"
CASE

if __name__ == "__main__":
    main()
"""
BEGIN = """
    fork_core(["no_such_module", "decimal", "colorsys"])
    fork_core()
    pid = waiting().pid
    assert "colorsys" not in sys.modules
    os.environ.update(SET_LATER="yes", CHANGED_LATER="after")
    del os.environ["REMOVED_LATER"]
    os.makedirs("folder", exist_ok=True)
    os.chdir("folder")
    log = os.open("log", os.O_WRONLY | os.O_CREAT)
    kept = os.dup(1)
    os.dup2(log, 1)
    process, connection = start()
    os.dup2(kept, 1)
    found = connection.recv()
    is_alive = process.is_alive()
    others = [start() for _ in range(2)]
    others = [(process.pid, connection.recv()["inherits"]) for process, connection in others]
    connection.send("end")
    process.join()
    print(json.dumps([pid, process.pid, found, is_alive, process.exitcode, others]), flush=True)
    os._exit(0)
"""


def program(folder: Path, case: str) -> list[str]:
    file = folder / "program.py"
    file.write_text(PROGRAM.replace("CASE", case))
    return [sys.executable, str(file)]


def run(folder: Path, case: str, **variables: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        program(folder, case),
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def last_line(done: subprocess.CompletedProcess[str]) -> Any:
    return json.loads(done.stdout.splitlines()[-1])


def test_the_process_begins_in_the_fork_with_what_the_explorer_has_then(tmp_path: Path) -> None:
    pid, started, found, is_alive, exit_code, others = last_line(
        run(tmp_path, BEGIN, REMOVED_LATER="yes", CHANGED_LATER="before")
    )
    assert (started, found["pid"], found["session"]) == (pid, pid, pid)
    assert (found["name"], found["threads"], found["inherits"]) == ("EngineCore", 1, "of the explorer")
    assert found["imported"], "by the fork alone"
    assert (found["SET_LATER"], found["REMOVED_LATER"], found["CHANGED_LATER"]) == ("yes", None, "after")
    assert found["folder"] == str(tmp_path / "folder")
    assert (tmp_path / "folder" / "log").read_text() == "printed by the process\n"
    assert is_alive and exit_code == 7
    assert len({pid, *(other for other, _ in others)}) == 3
    assert [inherits for _, inherits in others] == [None, None], "only one process begins in the fork"


@pytest.mark.parametrize(
    ("before", "printed"),
    [
        ("fork_core(); os.kill(waiting().pid, signal.SIGKILL); time.sleep(0.2)", ""),
        (
            "threading.Thread(target=time.sleep, args=(1000,), name='busy', daemon=True).start(); fork_core()",
            "threads (busy)",
        ),
        pytest.param(
            "import torch; torch.cuda.init(); fork_core()",
            "uses the GPU",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not os.path.exists("/dev/nvidiactl"), reason="no CUDA device")],
        ),
        ("", ""),
    ],
    ids=["fork was killed", "explorer has threads", "explorer uses a GPU", "no fork"],
)
def test_without_a_fork_the_process_is_spawned(tmp_path: Path, before: str, printed: str) -> None:
    case = f"\n    {before}\n    process, connection = start()\n    print(json.dumps([process.pid, connection.recv()]), flush=True)\n    os._exit(0)\n"
    done = run(tmp_path, case)
    pid, found = last_line(done)
    assert found["pid"] == pid and found["inherits"] is None
    assert printed in done.stderr and bool(printed) == ("will import vLLM again" in done.stderr)


@pytest.mark.parametrize("moment", ["waits", "works"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_fork_ends_with_its_explorer(tmp_path: Path, moment: str, number: signal.Signals) -> None:
    case = "\n    fork_core()\n    pid = waiting().pid\n"
    case += "    process, connection = start()\n    connection.recv()\n" if moment == "works" else ""
    case += "    print(pid, flush=True)\n    time.sleep(1000)\n"
    with subprocess.Popen(program(tmp_path, case), stdout=subprocess.PIPE, text=True) as explorer:
        assert explorer.stdout is not None
        fork = int(next(line for line in explorer.stdout if not line.startswith("printed")))
        assert process_lives(fork)
        explorer.send_signal(number)
    wait_until(lambda: not process_lives(fork), "the end of the fork")


def test_a_fork_that_is_not_used_ends_with_its_explorer_or_before(tmp_path: Path) -> None:
    case = "\n    fork_core()\n    print(waiting().pid, flush=True)\n"
    done = run(tmp_path, case)
    wait_until(lambda: not process_lives(int(done.stdout)), "the end of the fork")
    case = "\n    fork_core()\n    fork = take_fork()\n    fork.end()\n    print(os.path.exists(f'/proc/{fork.pid}'), take_fork())\n"
    done = run(tmp_path, case)
    assert (done.stdout, done.stderr) == ("False None\n", "")


def test_a_terminal_s_ctrl_c_does_not_reach_the_fork(tmp_path: Path) -> None:
    case = "\n    signal.signal(signal.SIGINT, signal.SIG_IGN)\n    fork_core()\n"
    case += "    while os.getsid(waiting().pid) == os.getsid(0):\n        time.sleep(0.01)\n"
    case += (
        "    os.killpg(0, signal.SIGINT)\n    time.sleep(0.2)\n    print(json.dumps(waiting().has_ended), flush=True)\n"
    )
    done = subprocess.run(
        program(tmp_path, case), start_new_session=True, capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert (json.loads(done.stdout), done.stderr) == (False, "")
