"""Stacks of the processes of a run, down to the line, to find out why one seems to hang.

In each process a thread waits for requests at a socket. While it holds the interpreter's lock no other thread runs Python code, so the stacks can be walked
safely. If code holds the lock elsewhere, the thread cannot answer. Then, and only then, SIGUSR1 lets a signal handler write the stacks into a file, without
the lock. The handler is no first choice: a thread that changes its stack meanwhile could end the process.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from rftdata.processes import pid_space

LOCK_S = 5.0
"""Seconds for which a process may need to answer; longer than a busy machine lets a thread wait."""
WITHOUT_LOCK = (
    f"No thread of the process answered within {LOCK_S:g} s, so its interpreter's lock is held by the code below, or it is suspended. A signal handler wrote "
    "these stacks:\n"
)
_LOOK_S = 0.05
_STILL_S = 0.5
_LONGEST_S = 10.0
_served: set[int] = set()


def answer_requests(run_folder: Path) -> None:
    """Report the stacks of this process whenever it is asked."""
    pid = os.getpid()
    path = _path(run_folder, pid)
    path.parent.mkdir(parents=True, exist_ok=True)
    # A descriptor that is never closed, because the handler writes to it as long as the process is running.
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
    atexit.register(path.unlink, missing_ok=True)
    if pid not in _served:  # a child has its parent's set, and none of its threads
        _served.add(pid)
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            server.bind(_address(pid))
            server.listen()
        except OSError:  # a child of an ended process of this id may have kept its socket; the signal handler is left
            server.close()
        else:
            threading.Thread(target=_serve, args=(server,), name="stacks", daemon=True).start()


def read_stacks(run_folder: Path, pids: Iterable[int]) -> dict[int, str]:
    """Return the stacks of processes of this machine (`rftdata.processes.is_here`), without those that do not answer.

    Those of a process whose interpreter's lock is not free begin with `WITHOUT_LOCK`.
    """
    asked = {pid: path for pid in pids if (path := _path(run_folder, pid)).exists() and _would_answer(pid)}
    until = time.monotonic() + LOCK_S
    with contextlib.ExitStack() as stack:
        connections = {pid: connection for pid in asked if (connection := _connected(pid)) is not None}
        for connection in connections.values():
            stack.enter_context(connection)
        answers = {pid: _answer(connection, until) for pid, connection in connections.items()}
    found = {pid: text for pid, text in answers.items() if text}
    return found | _by_signal({pid: path for pid, path in asked.items() if pid not in found})


def _serve(server: socket.socket) -> None:
    with server, contextlib.suppress(OSError):
        while True:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
                if user in (0, os.geteuid()):
                    connection.sendall(_own_stacks().encode())


def _own_stacks() -> str:
    """Return the stacks of all threads but this one."""
    # One call, during which no thread runs; into memory, because a file or a socket could block it.
    memory = os.memfd_create("stacks")
    try:
        faulthandler.dump_traceback(memory, all_threads=True)
        text = os.pread(memory, os.fstat(memory).st_size, 0).decode(errors="replace")
    finally:
        os.close(memory)
    return "\n\n".join(part for part in text.split("\n\n") if not part.startswith("Current thread"))


def _connected(pid: int) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(LOCK_S)
    try:
        connection.connect(_address(pid))
    except OSError:
        connection.close()
        return None
    return connection


def _answer(connection: socket.socket, until: float) -> str:
    """Return what a process sends until it closes the connection; an empty text if that takes too long."""
    parts: list[bytes] = []
    try:
        while True:
            connection.settimeout(max(_LOOK_S, until - time.monotonic()))
            part = connection.recv(2**16)
            if not part:
                return b"".join(parts).decode(errors="replace")
            parts.append(part)
    except OSError:
        return ""


def _by_signal(asked: Mapping[int, Path]) -> dict[int, str]:
    """Return the stacks that signal handlers write."""
    before = {pid: path.stat().st_size for pid, path in asked.items() if path.exists()}
    for pid in before:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    if before:
        _await_written({asked[pid]: size for pid, size in before.items()})
    written = {pid: path.read_text(encoding="utf-8")[before[pid] :] for pid, path in asked.items() if path.exists()}
    return {pid: WITHOUT_LOCK + text for pid, text in written.items() if text}


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


def _address(pid: int) -> str:
    """Return the address of a process, which is in no file system and ends with the process."""
    return f"\0rft-stacks-{pid_space()}-{pid}"


def _would_answer(pid: int) -> bool:
    """Return whether the process handles the signal, which would otherwise end it, such as a later process with the same id."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except FileNotFoundError:
        return False
    caught = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(caught >> (signal.SIGUSR1 - 1) & 1)
