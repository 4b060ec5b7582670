"""The fork server's records of the processes that it forks."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO

from rftcore.launch.local_processes import forked_process, role_process


@dataclass(frozen=True)
class Preload:
    """What the process of a role does before its task is known.

    Attributes:
        environment: variables of the task.
        preparation: a pickled `Preparation`.
    """

    role: str
    environment: Mapping[str, str]
    preparation: bytes


@dataclass
class Child:
    """The server's record of a role's process.

    Attributes:
        pidfd: readable once it has ended.
        result: receives what it raised.
        raised: what it has received.
        output: what it has printed and not copied to its log; None if it began with the log.
        log: file of the role's output.
    """

    pid: int
    pidfd: int
    result: Connection
    raised: bytes = b""
    output: IO[bytes] | None = None
    log: Path | None = None

    def ends(self) -> list[int | Connection]:
        """Return the files to wait for."""
        return [self.pidfd] if self.result.closed else [self.pidfd, self.result]

    def receive(self) -> None:
        """Receive the error that the role has raised, if it has arrived."""
        if not self.result.closed and self.result.poll():
            with contextlib.suppress(EOFError, OSError), self.result:
                self.raised = self.result.recv_bytes()

    def kill(self) -> None:
        """Kill the role and the other processes of its session. No other process has its id until `status` is called."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.pid, signal.SIGKILL)  # it may not have a session yet
            os.killpg(self.pid, signal.SIGKILL)

    def status(self) -> int:
        """Reap the process; return how it ended, see `Ended.status`."""
        os.close(self.pidfd)
        self.result.close()
        if self.output is not None:
            with self.output, contextlib.suppress(OSError):  # of a full disk
                self._keep_output(self.output)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def _keep_output(self, output: IO[bytes]) -> None:
        """Append to the log what the process printed before it opened the log, and what a child of that time printed later."""
        output.seek(0)
        printed = output.read().lstrip(b"\0")  # of a file that was emptied between two writes
        if self.log is not None and printed:
            with open(forked_process.open_log(self.log), "wb") as log:
                log.write(f"== printed by process {self.pid} before it had this log ==\n".encode() + printed)


@dataclass
class WaitingChild:
    """A process that waits for a task.

    Attributes:
        task_file: gets the task. The process may still import modules, so that a pipe might have no room for it.
        is_written: tells the process that it has.
    """

    preload: Preload
    child: Child
    task_file: IO[bytes]
    is_written: Connection

    def give(self, task: bytes, log: Path) -> bool:
        """Give it its task; return whether it was still running.

        Args:
            log: file of the role's output.
        """
        self.child.log = log
        with self.task_file as file, self.is_written, contextlib.suppress(OSError):
            file.write(task)
            file.flush()
            self.is_written.send_bytes(b"task")
            return not wait([self.child.pidfd], 0)
        return False

    def end(self) -> None:
        """End the process."""
        self.child.log = None  # another process becomes the role
        self.task_file.close()
        self.is_written.close()
        self.child.kill()
        self.child.status()


def fork_waiting(preload: Preload) -> WaitingChild:
    """Fork a process that imports modules and waits for its task.

    Raises:
        OSError: the system refuses.
    """
    server = os.getpid()
    with contextlib.ExitStack() as undo:
        task_file: IO[bytes] = undo.enter_context(tempfile.TemporaryFile())
        output: IO[bytes] = undo.enter_context(tempfile.TemporaryFile())
        told, is_written = (undo.enter_context(end) for end in Pipe(duplex=False))
        child = fork(
            lambda result: role_process.preload(
                result, server, role_process.Given(task_file, told, output), preload.preparation, preload.environment
            )
        )
        undo.pop_all()
    child.output = output
    told.close()
    return WaitingChild(preload, child, task_file, is_written)


def fork(work: Callable[[Connection], None]) -> Child:
    """Fork a process that works, and passes what it raises to a connection.

    Raises:
        OSError: the system refuses.
    """
    with contextlib.ExitStack() as undo:
        ours, theirs = Pipe(duplex=False)
        undo.callback(ours.close)
        with theirs:
            if (pid := os.fork()) == 0:
                forked_process.exit_after(lambda: work(theirs))
        undo.callback(os.waitpid, pid, 0)
        undo.callback(os.kill, pid, signal.SIGKILL)
        child = Child(pid, os.pidfd_open(pid), ours)
        undo.pop_all()
    return child
