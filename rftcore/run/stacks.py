"""Stacks of the processes of a run, down to the line, to find out why one seems to hang.

In each process a thread waits for requests at a socket. While it holds the interpreter's lock no other thread runs Python code, so the stacks can be walked
safely. If code holds the lock elsewhere, the thread cannot answer. It also waits where many threads take the lock in turn, so a process whose threads work is
given longer. Only then SIGUSR1 is sent to the main thread and those that work most, one after the other, and a signal handler of each writes its own stack
into a file, without the lock. It never walks the stack of another thread, which could change meanwhile and end the process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import os
import selectors
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from rftcore.run.thread_times import Thread, ThreadTimes
from rftdata.processes import pid_space

LOCK_S = 5.0
"""Seconds for which a process may need to answer; longer than a busy machine lets a thread wait."""
BUSY_S = 30.0
"""The same while several threads of the process work, which may take the lock in turn."""
WITHOUT_LOCK = "The interpreter's lock of the process"
"""Beginning of the stacks of a process that did not answer."""
_LOOK_S = 0.25
_WRITTEN_LOOK_S = 0.05
_STILL_S = 0.5
_LONGEST_S = 3.0
_STACKS = b"stacks"
_MOST_SIGNALS = 8
_MOST_LISTED = 16
_served: set[int] = set()


def answer_requests(run_folder: Path) -> None:
    """Report the stacks of this process whenever it is asked."""
    pid = os.getpid()
    path = _path(run_folder, pid)
    path.parent.mkdir(parents=True, exist_ok=True)
    # A descriptor that is never closed, because the handler writes to it as long as the process is running.
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=False)
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
    times = {pid: ThreadTimes(pid) for pid in asked}
    found = _answers(times)
    return found | {
        pid: text for pid, path in asked.items() if pid not in found and (text := _by_signal(path, times[pid]))
    }


def _serve(server: socket.socket) -> None:
    # From the moment at which a connection is accepted until its answer is sent, no call releases the lock: where many threads wait for it, each
    # release costs a whole round. Stacks are written into memory, because a socket could block this thread while it holds the lock.
    with server, contextlib.suppress(OSError):
        while True:
            memory = os.memfd_create("stacks")
            try:
                connection, _ = server.accept()
                with connection, contextlib.suppress(OSError):
                    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
                    if user in (0, os.geteuid()):
                        faulthandler.dump_traceback(memory, all_threads=True)
                        socket.send_fds(connection, [_STACKS], [memory])
            finally:
                os.close(memory)


def _connected(pid: int) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(LOCK_S)
    try:
        connection.connect(_address(pid))
    except OSError:
        connection.close()
        return None
    return connection


def _answers(times: Mapping[int, ThreadTimes]) -> dict[int, str]:
    """Return the stacks that threads of processes report, without processes that take too long."""
    found: dict[int, str] = {}
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        for pid in times:
            if (connection := _connected(pid)) is not None:
                selector.register(stack.enter_context(connection), selectors.EVENT_READ, pid)
        looked = time.monotonic()
        while selector.get_map():
            for key, _ in selector.select(_LOOK_S):
                selector.unregister(key.fileobj)
                found[key.data] = _received(key.fileobj)
            if time.monotonic() - looked < _LOOK_S:
                continue
            looked = time.monotonic()
            for key in list(selector.get_map().values()):
                if not _may_answer(times[key.data]):
                    selector.unregister(key.fileobj)
    return {pid: text for pid, text in found.items() if text}


def _received(connection: object) -> str:
    """Return the stacks of all threads but the one that reports them; an empty text if the process has ended."""
    assert isinstance(connection, socket.socket)
    memory: list[int] = []
    try:
        _, memory, _, _ = socket.recv_fds(connection, len(_STACKS), 1)
        text = b"".join(os.pread(file, os.fstat(file).st_size, 0) for file in memory).decode(errors="replace")
    except OSError:
        return ""
    finally:
        for file in memory:
            os.close(file)
    return "\n\n".join(part for part in text.split("\n\n") if not part.startswith("Current thread"))


def _may_answer(times: ThreadTimes) -> bool:
    times.look()
    return times.seconds < (BUSY_S if times.num_working(LOCK_S) > 1 else LOCK_S)


def _by_signal(path: Path, times: ThreadTimes) -> str:
    """Return the stacks that signal handlers of single threads write, and a list of the other threads; an empty text if the process has ended."""
    seconds = times.seconds
    since = time.strftime("%H:%M:%S", time.localtime(time.time() - seconds))
    times.look()
    threads = times.threads()
    main_thread, others = threads[:1], threads[1:]
    signalled = main_thread + [thread for thread in others if thread.used_s > 0][: _MOST_SIGNALS - 1]
    stacks = [f"Thread {_described(thread)}\n{_own_stack(path, times.pid, thread)}" for thread in signalled]
    left = [thread for thread in threads if thread not in signalled]
    if not stacks or not path.exists():
        return ""
    if left:
        more = f", and {len(left) - _MOST_LISTED} more" if len(left) > _MOST_LISTED else ""
        stacks.append(f"Other threads: {'; '.join(map(_described, left[:_MOST_LISTED]))}{more}")
    holders = "several threads that work hold it in turn" if times.num_working(LOCK_S) > 1 else "code below holds it"
    begin = (
        f"{WITHOUT_LOCK} was not free for {seconds:.0f} s (since {since}): {holders}, or the process is suspended. "
        "Signal handlers wrote the stacks of its main thread and of those that used the most processor time meanwhile."
    )
    return "\n\n".join([begin, *stacks])


def _described(thread: Thread) -> str:
    return f"{thread.thread_id} ({thread.name}, state {thread.state}, {thread.used_s:.2f} s of processor time)"


def _own_stack(path: Path, pid: int, thread: Thread) -> str:
    """Return what the signal handler of a thread writes."""
    if thread.state in "Tt":
        return "  is suspended"
    try:
        before = path.stat().st_size
        ctypes.CDLL(None).tgkill(pid, thread.thread_id, signal.SIGUSR1)
        _await_written(path, before)
        text = path.read_bytes()[before:].decode(errors="replace")
    except FileNotFoundError:  # the process has ended
        text = ""
    return text.rstrip() or f"  wrote no stack within {_LONGEST_S:g} s; it may run no Python code"


def _await_written(path: Path, before: int) -> None:
    """Wait until a file has grown from a size and no longer changes: a busy machine may suspend a process within its stack."""
    size, since = before, time.monotonic()
    while time.monotonic() - since < (_LONGEST_S if size == before else _STILL_S):
        time.sleep(_WRITTEN_LOOK_S)
        if (now := path.stat().st_size) != size:
            size, since = now, time.monotonic()


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
