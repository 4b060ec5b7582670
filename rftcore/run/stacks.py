"""Stacks of the processes of a run, down to the line, to find out why one seems to hang.

Each process lets the system write the stacks of all its threads into a separate file when SIGUSR1 arrives. That does not need the
interpreter, so it works while a thread is stuck inside a library.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from rftdata.processes import pid_space

_LOOK_S = 0.05
_STILL_S = 0.5
_LONGEST_S = 10.0


def answer_requests(run_folder: Path) -> None:
    """Write the stacks of this process whenever it is asked."""
    path = _path(run_folder, os.getpid())
    path.parent.mkdir(parents=True, exist_ok=True)
    # A descriptor that is never closed, because the handler writes to it as long as the process is running.
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
    atexit.register(path.unlink, missing_ok=True)


def read_stacks(run_folder: Path, pids: Iterable[int]) -> dict[int, str]:
    """Return the stacks of processes of this machine (`rftdata.processes.is_here`), without those that do not answer."""
    asked = {pid: path for pid in pids if (path := _path(run_folder, pid)).exists() and _would_answer(pid)}
    before = {pid: path.stat().st_size for pid, path in asked.items()}
    for pid in asked:
        os.kill(pid, signal.SIGUSR1)
    if asked:
        _await_written({path: before[pid] for pid, path in asked.items()})
    return {pid: path.read_text(encoding="utf-8")[before[pid] :] for pid, path in asked.items() if path.exists()}


def _await_written(before: Mapping[Path, int]) -> None:
    """Wait until every file has grown or was removed, and then no longer changes: a busy machine may suspend a process within its stack.

    Args:
        before: sizes of the files when their processes were asked.
    """
    until, sizes, since = time.monotonic() + _LONGEST_S, dict(before), time.monotonic()
    while time.monotonic() < until:
        time.sleep(_LOOK_S)
        now = {path: path.stat().st_size if path.exists() else -1 for path in before}
        if now != sizes:
            sizes, since = now, time.monotonic()
        if time.monotonic() - since > _STILL_S and all(size != before[path] for path, size in sizes.items()):
            return


def _path(run_folder: Path, pid: int) -> Path:
    # Hosts and containers may share the folder, and each counts its processes from 1.
    return run_folder / "stacks" / f"{socket.gethostname()}-{pid_space()}-{pid}.txt"


def _would_answer(pid: int) -> bool:
    """Return whether the process handles the signal, which would otherwise end it, such as a later process with the same id."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except FileNotFoundError:
        return False
    caught = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(caught >> (signal.SIGUSR1 - 1) & 1)
