"""How a role's process ended that raised no error: by which signal, or with which exit code.

A process of this machine is watched by a pidfd. After its end, the kernel returns its exit status through the pidfd (Linux 6.15), and the
process table has it until its parent reaps the process. The control group counts kills for lack of memory. About a process on
another machine, only the launcher knows anything.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
import threading
import time
from enum import Enum, auto
from pathlib import Path

from rftdata.processes import is_here, pid_space

# ioctl PIDFD_GET_INFO: mask (u64), cgroup id (u64), eleven ids (u32), exit code (i32), which PIDFD_INFO_EXIT asks for.
_PIDFD_INFO = struct.Struct("=QQ11Ii")
_PIDFD_GET_INFO = 3 << 30 | _PIDFD_INFO.size << 16 | 0xFF << 8 | 11
_PIDFD_INFO_EXIT = 1 << 3
_COLLECTED_S = 1.0
_LOG_LINES = 15
_LOG_BYTES = 16384

# Signals that a process's own fault raises; others are sent to it.
_FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS}


class ExitCause(Enum):
    """What a launcher knows about the end of a process."""

    TERMINATED = auto()
    """SIGTERM ended it."""
    LOW_MEMORY = auto()
    """Ray killed it because its machine ran low on memory."""
    MACHINE_LOST = auto()
    """Its machine left the Ray cluster."""


class RoleExitError(Exception):
    """A role's process ended without raising an error. The message continues the role's name: "was killed by signal 9, …".

    Attributes:
        crashed: whether it ended by a fault or for lack of memory, which its work may have caused.
    """

    def __init__(self, message: str, *, crashed: bool = False) -> None:
        super().__init__(message)
        self.crashed = crashed


class ProcessWatch:
    """Observes the end of one process from another one.

    Args:
        host, pid: of the process.
        log: the file that it writes its errors to; empty if there is none.
        space: the space of process ids that `pid` belongs to (`rftdata.processes.pid_space`); by default that of this process. Nothing is known
            about the end of a process in another space.
        ignored_lines: beginnings of lines of the log that the launcher writes.
    """

    def __init__(
        self, host: str, pid: int, log: str = "", space: str | None = None, *, ignored_lines: tuple[str, ...] = ()
    ) -> None:
        self.host, self.pid, self.log = host, pid, log
        self._ignored_lines = ignored_lines
        self.pid_space = pid_space() if space is None else space
        self._status: int | None = None
        self._oom_kills = _count_oom_kills()
        self._ended: threading.Thread | None = None
        self._pidfd = -1  # closed
        self._closes = threading.Lock()
        if is_here(host, self.pid_space):
            with contextlib.suppress(OSError):
                self._pidfd = os.pidfd_open(pid)
                self._ended = threading.Thread(target=self._await_end, name=f"watches {pid}", daemon=True)
                self._ended.start()

    def exit_error(self, cause: ExitCause | None = None, status: int | None = None) -> RoleExitError:
        """Describe how the process ended.

        Args:
            cause: what the launcher knows; None if it knows nothing.
            status: its exit code, or the negative number of a signal; None if only the system knows.
        """
        if status is not None:
            self._status = -status if status < 0 else status << 8
        elif self._ended is not None:
            self._ended.join(timeout=2.0)
        if cause is ExitCause.LOW_MEMORY:
            return RoleExitError("was killed by Ray because its machine ran low on memory", crashed=True)
        status = self._status
        if status is None:
            if cause is ExitCause.TERMINATED:
                return RoleExitError("was ended by SIGTERM")
            if cause is ExitCause.MACHINE_LOST:
                return RoleExitError("was lost with its machine, which left the Ray cluster")
            return RoleExitError("ended without an error, possibly killed for lack of memory")
        if not os.WIFSIGNALED(status):
            ended = (
                "was ended by SIGTERM"
                if cause is ExitCause.TERMINATED
                else f"exited with code {os.WEXITSTATUS(status)}"
            )
            return RoleExitError(f"{ended} (process {self.pid})")
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            name = signal.strsignal(number) or "unknown"  # Signals(number) has no real-time signals
            return RoleExitError(
                f"was killed by signal {number} ({name}, process {self.pid})",
                crashed=number in _FAULTS,
            )
        if self._oom_kills is not None and (_count_oom_kills() or 0) > self._oom_kills:
            why = f"was killed by the kernel for lack of memory (signal 9, process {self.pid})"
            return RoleExitError(why, crashed=True)
        return RoleExitError(f"was killed by signal 9, possibly for lack of memory (process {self.pid})")

    def kill(self) -> None:
        """Kill the process at once, if it runs on this machine."""
        with self._closes, contextlib.suppress(ProcessLookupError):
            if self._pidfd >= 0:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def log_tail(self) -> str:
        """Return the last lines of the process's log, or where it is; empty if nothing is known."""
        if not self.log:
            return ""
        if not is_here(self.host, self.pid_space):
            return f"its log is {self.log} on {self.host}"
        try:
            with open(self.log, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_BYTES))
                text = file.read().decode(errors="replace")
        except OSError:
            return ""
        _, began, own = text.rpartition(f": process {self.pid}, ")
        text = own.partition("\n")[2] if began else text  # others may have used the file before
        lines = [line for line in text.splitlines() if line.strip() and not line.startswith(self._ignored_lines)]
        return "\n".join([f"its log ({self.log}) ends with:", *lines[-_LOG_LINES:]]) if lines else ""

    def _await_end(self) -> None:
        """Wait for the end and read the status at once, before its parent reaps the process."""
        ended = select.poll()
        ended.register(self._pidfd, select.POLLIN)
        ended.poll()
        deadline = time.monotonic() + _COLLECTED_S
        try:
            while self._status is None:
                is_late = (
                    time.monotonic() > deadline
                )  # read before the last look, because this thread may be delayed too
                self._status = _collected_status(self._pidfd)
                if self._status is None:
                    self._status = _zombie_status(self.pid)
                if is_late:
                    break
                time.sleep(0.001)  # the pidfd has the status only once the process is reaped
        finally:
            with self._closes:
                os.close(self._pidfd)
                self._pidfd = -1


def _collected_status(pidfd: int) -> int | None:
    """Return the wait status of a reaped process; None before that, and on older kernels."""
    request = bytearray(_PIDFD_INFO.pack(_PIDFD_INFO_EXIT, *[0] * 13))
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, request)
    except OSError:
        return None
    mask, *_, status = _PIDFD_INFO.unpack(request)
    return int(status) if mask & _PIDFD_INFO_EXIT else None


def _zombie_status(pid: int) -> int | None:
    """Return the wait status of a process that has ended and is not reaped yet."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[49]) if fields[0] == "Z" else None


def _count_oom_kills() -> int | None:
    """Count the processes of this control group that the kernel killed for lack of memory; None if it has no such count."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, place = line.split(":", 2)
            if controllers == "":
                counts = Path(f"/sys/fs/cgroup{place}") / "memory.events"
            elif controllers == "memory":
                counts = Path(f"/sys/fs/cgroup/memory{place}") / "memory.oom_control"
            else:
                continue
            with contextlib.suppress(OSError):
                values = dict(entry.split(None, 1) for entry in counts.read_text(encoding="utf-8").splitlines())
                if "oom_kill" in values:
                    return int(values["oom_kill"])
    return None
