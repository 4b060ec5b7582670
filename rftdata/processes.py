"""Identification of processes in rows, and whether such a process has ended.

Containers may have one host name, and each of them numbers its processes from 1. So a process is named by its host, its number, the space in
which that number counts (a boot of a kernel and a process id namespace), and the time at which it started, which a later process with the same
number does not share. Only a process of this space can be looked up. For all others, only heartbeats and leases show it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import time
import uuid
from typing import Any


def own_process() -> dict[str, Any]:
    """Return the columns that name this process: host, pid, pid_space and pid_started."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "pid_space": pid_space(),
        "pid_started": started_at(os.getpid()) or 0,
    }


def machine() -> str:
    """Return an identifier of the running kernel: the same in all processes and containers on it, different after a reboot."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip().replace("-", "")
    except OSError:
        return f"{uuid.getnode():012x}"


def pid_space() -> str:
    """Return an identifier of the space of process ids: the same in all processes that see each other under the same ids."""
    try:
        return f"{machine()}.{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return machine()  # without /proc there are no such namespaces


def is_here(host: str, space: str) -> bool:
    """Return whether the process ids of a space on a host are those of this process."""
    return host == socket.gethostname() and space == pid_space()


def has_ended(host: str, pid: int, space: str, started: int) -> bool:
    """Return whether a process has certainly ended; false for one that cannot be looked up from here."""
    if not is_here(host, space):
        return False
    if not process_lives(pid):
        return True
    now = started_at(pid)
    return bool(now and started and now != started)


def started_at(pid: int) -> int | None:
    """Return when a process of this space started, in clock ticks since the kernel's start; None if that is not known."""
    fields = _stat(pid)
    return None if fields is None else int(fields[19])


def own_age_s() -> float:
    """Return the seconds since this process started; 0 if that is not known."""
    started = started_at(os.getpid())
    if started is None:
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK"))


def process_lives(pid: int) -> bool:
    """Return whether a process of this space runs (a zombie does not)."""
    fields = _stat(pid)
    if fields is not None:
        return fields[0] not in ("Z", "X")
    try:
        os.kill(pid, 0)  # /proc may be missing, or hide the processes of other users
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def await_exit(child: subprocess.Popen[Any], timeout_s: float) -> bool:
    """Wait until a child has ended, and leave its exit code to be taken by `wait`; return whether it has.

    Until then no other process gets its number, so its process group can be ended by that number (`kill_group`).
    """
    if child.returncode is not None:
        return True
    try:
        ends = os.pidfd_open(child.pid)
    except ProcessLookupError:  # another thread has taken the code
        return True
    try:
        waits = select.poll()  # not `select`, which takes no number above 1023
        waits.register(ends, select.POLLIN)
        return bool(waits.poll(1000 * timeout_s))
    finally:
        os.close(ends)


def kill_group(child: subprocess.Popen[Any]) -> None:
    """Kill the process group that a child leads, also if the child itself has ended, but not once its exit code is taken.

    From then on another program may have the number: a machine that starts a thousand processes a second uses it again within a minute.
    (Nothing protects the microseconds between the end of another thread's `wait` and this check.)
    """
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)


def _stat(pid: int) -> list[str] | None:
    """Return what /proc/PID/stat has after the name; None if it cannot be read, or /proc is that of another space."""
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            return None
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    # The process ended between opening and reading, or is another user's, where /proc is mounted with hidepid=1.
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
