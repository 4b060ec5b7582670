"""The processes that a test session started, in its own processes or in those of the commands it tried.

Embedded servers outlive their starters by design, and what a test started outlives a session that is interrupted. All inherit an environment
variable, by which the end of the session finds them:

- a session that ends in good order stops its servers, and reports those that do not stop;
- when the session's first process has ended, however that happened, a guard kills what is left and removes the session's folders and networks.

A program that starts processes of its own (`tests/crash/storm.py`) has a mark and a guard of its own, so that nothing of it outlives it, within a
session or by hand: see `begin_program`.

    python tests/support/session_processes.py VARIABLE MARK PID    the guard; it waits for the end of a process
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

_MARK = "RFT_TEST_SESSION"
PROGRAM = "RFT_TESTPROGRAM"
_STOP_S = 30.0


def mark_session() -> None:
    """Name the session to everything that it starts, and start its guard; a process of a session keeps the name it inherits."""
    if _MARK in os.environ:
        return
    mark = secrets.token_hex(4)
    _start_guard(_MARK, mark)
    os.environ[_MARK] = mark


def begin_program() -> str:
    """Begin this program again under a mark of its own, which its forks have, too; return what the names of its folders begin with.

    When its process has ended, however that happened, everything that it started is killed, and its folders and networks are removed. That is how
    SIGTERM ends it, too: an exception of a handler is lost where Python cannot raise it, as in what runs beside a fork.
    """
    own = f"{os.getpid()}-"
    if not os.environ.get(PROGRAM, "").startswith(own):
        os.environ.pop(PROGRAM, None)  # of an outer program
        mark = own + secrets.token_hex(4)
        _start_guard(PROGRAM, mark)
        # In the environment with which a process began, which its forks show as theirs.
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, PROGRAM: mark})
    return f"rft-test-{os.environ[PROGRAM]}-"


def _start_guard(variable: str, mark: str) -> None:
    nothing = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in (0, 1, 2)]
    # Without any mark, so that no other guard ends it before its work is done; in a session of its own, so that no Ctrl-C reaches it.
    environment = {name: value for name, value in os.environ.items() if name not in (_MARK, PROGRAM)}
    os.posix_spawn(
        sys.executable,
        [sys.executable, str(Path(__file__)), variable, mark, str(os.getpid())],
        environment,
        setsid=True,
        file_actions=nothing,
    )


def folder_prefix() -> str:
    """What the names of the session's folders outside pytest's own begin with."""
    return f"rft-test-{os.environ[_MARK]}-"


def network_alias() -> str:
    """The alias of the session's or program's network interfaces, by which the guard finds them."""
    return f"rft-test-{os.environ.get(PROGRAM) or os.environ[_MARK]}"


def servers() -> list[psutil.Process]:
    """The first process of each PostgreSQL server of the session that runs."""
    found = [process for process in processes(os.environ[_MARK]) if _name(process) == "postgres"]
    return [process for process in found if _name(process.parent()) != "postgres"]


def processes(mark: str, variable: str = _MARK) -> list[psutil.Process]:
    """The processes of a session that run, or those that have another variable of this value."""
    assert mark, "without a mark, all processes of the machine would be meant"
    return [process for process in psutil.process_iter() if _has_mark(process, variable, mark)]


def _has_mark(process: psutil.Process, variable: str, mark: str) -> bool:
    return environment(process).get(variable) == mark


def environment(process: psutil.Process) -> dict[str, str]:
    """With which a process began; nothing if it has ended, or is another user's."""
    try:
        return process.environ()
    except psutil.Error:
        return {}


def _name(process: psutil.Process | None) -> str:
    try:
        return "" if process is None else process.name()
    except psutil.Error:
        return ""


def stop(processes: list[psutil.Process]) -> list[psutil.Process]:
    """End servers and their sessions; those that do not end in time."""
    for process in processes:
        try:
            process.send_signal(signal.SIGINT)  # PostgreSQL's fast shutdown
        except psutil.NoSuchProcess:
            continue
    return psutil.wait_procs(processes, timeout=_STOP_S)[1]


def _end(variable: str, mark: str) -> None:
    """Kill every process with a mark, and remove the folders and network interfaces named by it."""
    while left := processes(mark, variable):
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(left, timeout=1.0)  # again: one of them may just have started another
    for parent in (tempfile.gettempdir(), "/dev/shm"):
        for folder in Path(parent).glob(f"rft-test-{mark}-*"):
            shutil.rmtree(folder, ignore_errors=True)
    for alias in Path("/sys/class/net").glob("*/ifalias"):
        with contextlib.suppress(OSError):  # removed with its peer, or by its owner
            if alias.read_text().strip() == f"rft-test-{mark}":
                subprocess.run(["ip", "link", "delete", alias.parent.name], stderr=subprocess.DEVNULL, check=False)


if __name__ == "__main__":
    with contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(int(sys.argv[3]))], [], [])
    _end(sys.argv[1], sys.argv[2])
