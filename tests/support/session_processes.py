"""The processes that a test session started, in its own processes or in those of the commands it tried.

Embedded servers outlive their starters by design, and what a test started outlives a session that is interrupted. All inherit an environment
variable, by which the end of the session finds them:

- a session that ends in good order stops its servers, and reports those that do not stop;
- when the session's first process has ended, however that happened, a guard kills what is left and removes the session's folders.

    python tests/support/session_processes.py MARK PID    the guard; it waits for the end of a process
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import psutil

_MARK = "RFT_TEST_SESSION"
_STOP_S = 30.0


def mark_session() -> None:
    """Name the session to everything that it starts, and start its guard; a process of a session keeps the name it inherits."""
    if _MARK in os.environ:
        return
    mark = secrets.token_hex(4)
    nothing = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in (0, 1, 2)]
    # Without the mark, so that it is none of the session's processes; in a session of its own, so that no Ctrl-C reaches it.
    os.posix_spawn(
        sys.executable,
        [sys.executable, str(Path(__file__)), mark, str(os.getpid())],
        os.environ,
        setsid=True,
        file_actions=nothing,
    )
    os.environ[_MARK] = mark


def folder_prefix() -> str:
    """What the names of the session's folders outside pytest's own begin with."""
    return f"rft-test-{os.environ[_MARK]}-"


def servers() -> list[psutil.Process]:
    """The first process of each PostgreSQL server of the session that runs."""
    found = [process for process in processes(os.environ[_MARK]) if _name(process) == "postgres"]
    return [process for process in found if _name(process.parent()) != "postgres"]


def processes(mark: str) -> list[psutil.Process]:
    """The processes of a session that run."""
    return [process for process in psutil.process_iter() if _has_mark(process, mark)]


def _has_mark(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(_MARK) == mark
    except psutil.Error:  # it has ended, or is another user's
        return False


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


def _end(mark: str) -> None:
    """Kill every process of a session, and remove its folders."""
    while left := processes(mark):
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(left, timeout=1.0)  # again: one of them may just have started another
    for parent in (tempfile.gettempdir(), "/dev/shm"):
        for folder in Path(parent).glob(f"rft-test-{mark}-*"):
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    with contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(int(sys.argv[2]))], [], [])
    _end(sys.argv[1])
