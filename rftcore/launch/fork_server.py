"""A process that imports what roles need, once, and forks a process for each role.

Importing torch and transformers takes seconds of a core for each process. The fork server is forked when `rft run` begins and imports them
while the run is prepared. A role that it forks works at once, and roles share the memory of what was imported.

What always holds: the fork server runs no thread and computes nothing, so that its forks are safe. It ends with `rft run`, and roles end with
it, however that happens. A role has a session of its own, which signals to the process group of `rft run` do not reach: `rft run` receives
them, and asks the roles to stop. What a role prints is in its log file.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import io
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import FrameType
from typing import Any

from rftcore.garbage import collect_rarely, large_imports
from rftcore.launch.launcher import RoleTask, run_role
from rftcore.run.parent_process import end_with_parent
from rftdata.errors import RftError

_fork = multiprocessing.get_context("fork")
_CLOSE_S = 5.0
TERMINATED = 128 + signal.SIGTERM
"""Exit code of a role that SIGTERM ended."""
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Started:
    """A role's process runs."""

    key: int
    pid: int


@dataclass(frozen=True)
class Ended:
    """A role's process has ended.

    Attributes:
        status: exit code, or the negative number of the signal that killed it.
        error: what it raised; None if it raised nothing, or was killed.
    """

    key: int
    status: int
    error: BaseException | None


class ForkServer:
    """The fork server of this process.

    Args:
        modules: imported in it; one that cannot be imported is left to the role that needs it.
        environment: variables that must be set before the modules are imported.
    """

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        self._connection, theirs = _fork.Pipe()
        self._process = _fork.Process(
            target=_serve, args=(theirs, os.getpid(), modules, dict(environment)), name="fork server"
        )
        # Until the child ignores them, a signal to the group would end it, or run a handler of this process in it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def start(self, key: int, task: RoleTask, log: Path) -> None:
        """Fork a process for a role; `events` returns that it has started, and later that it has ended.

        Args:
            key: names the process in events.
            log: file to which it appends what it prints.
        """
        with contextlib.suppress(OSError):  # the server has ended, which `exit_status` tells
            self._connection.send((key, task, log))

    def events(self, timeout_s: float) -> list[Started | Ended]:
        """Wait for a short time for events; return them in their order."""
        found: list[Started | Ended] = []
        try:
            while self._connection.poll(0 if found else timeout_s):
                found.append(self._connection.recv())
        except (EOFError, OSError):
            self._process.join(timeout_s)
        return found

    @property
    def exit_status(self) -> int | None:
        """How the server ended: its exit code, or the negative number of a signal; None while it runs."""
        return self._process.exitcode

    def close(self) -> None:
        """End the server, and its roles with it."""
        self._connection.close()
        self._process.join(_CLOSE_S)
        self._process.kill()
        self._process.join()


@dataclass
class _Child:
    """A role's process, as the server sees it.

    Attributes:
        pidfd: readable once it has ended.
        result: receives what it raised.
    """

    key: int
    process: ForkProcess
    pidfd: int
    result: Connection
    error: BaseException | None = None

    def ends(self) -> list[int | Connection]:
        """Return what becomes readable when there is something to receive."""
        return [self.pidfd] if self.result.closed else [self.pidfd, self.result]


def _serve(connection: Connection, parent: int, modules: Sequence[str], environment: dict[str, str]) -> None:
    """Be the fork server until the other end of the connection is closed."""
    _leave_parent(parent, [connection.fileno()])
    for number in _STOPS:  # to every process of a job or a machine: `rft run` decides what they mean
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
    _redirect(os.open(os.devnull, os.O_WRONLY))
    os.environ.update(environment)
    collect_rarely()
    with large_imports():
        for module in modules:
            with contextlib.suppress(Exception):  # the role imports it again, and reports the error
                importlib.import_module(module)
    children: list[_Child] = []
    while True:
        ready = set(wait([connection, *(end for child in children for end in child.ends())]))
        for child in [child for child in children if not ready.isdisjoint(child.ends())]:
            _receive(child)
            if child.pidfd in ready:
                children.remove(child)
                connection.send(_ended(child))
        if connection in ready:
            try:
                key, task, log = connection.recv()
            except (EOFError, OSError):
                break
            children.append(child := _start(key, task, log))
            assert child.process.pid is not None
            connection.send(Started(key, child.process.pid))
    for child in children:
        child.process.kill()
        child.process.join()


def _start(key: int, task: RoleTask, log: Path) -> _Child:
    ours, theirs = _fork.Pipe(duplex=False)
    process = _fork.Process(target=_work, args=(theirs, os.getpid(), task, log), name=task.name)
    process.start()
    theirs.close()
    assert process.pid is not None
    return _Child(key, process, os.pidfd_open(process.pid), ours)


def _receive(child: _Child) -> None:
    """Take what a role has raised, if it has arrived."""
    if child.result.closed or not child.result.poll():
        return
    with contextlib.suppress(EOFError, OSError), child.result:
        child.error = child.result.recv()


def _ended(child: _Child) -> Ended:
    child.process.join()
    os.close(child.pidfd)
    child.result.close()
    status = child.process.exitcode
    assert status is not None
    child.process.close()
    return Ended(child.key, status, child.error)


def _work(result: Connection, parent: int, task: RoleTask, log: Path) -> None:
    """Be the process of a role."""
    atexit._clear()  # those of `rft run`
    _leave_parent(parent, [result.fileno()])
    _redirect(_open_log(log))
    os.environ.update(task.environment)
    _apply_environment()
    signal.signal(signal.SIGTERM, _terminate)
    try:
        code = run_role(task.role, task.config, task.run, task.options)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - the boundary: the supervisor reports every error with the role's name
        if not isinstance(error, RftError):
            traceback.print_exc()
        result.send(_picklable(error))
        code = 1
    finally:
        atexit._run_exitfuncs()  # `multiprocessing` leaves them out
    sys.exit(code)


def _terminate(number: int, frame: FrameType | None) -> None:
    """End a role as an error would, so that it leaves the run and releases what it has claimed."""
    sys.exit(TERMINATED)


def _open_log(log: Path) -> int:
    """Open the file for what a process prints; where that is not possible, it is not kept."""
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        return os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)


def _leave_parent(parent: int, kept: Sequence[int]) -> None:
    """Let a forked process stand by itself: it has a session of its own, no file of its parent but `kept`, and ends with the parent."""
    os.setsid()
    for number in (*_STOPS, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    end_with_parent(parent)
    opened = sorted({int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, *kept})
    for descriptor in opened:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def _redirect(output: int) -> None:
    """Let this process read nothing, and print into a file."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, target in ((nothing, (0,)), (output, (1, 2))):
        for number in target:
            os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - they stay open as long as the process
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.BufferedWriter(_Log(number, "w", closefd=False)), encoding="utf-8", line_buffering=True)
        for number in (1, 2)
    )


class _Log(io.FileIO):
    """A file that a process prints into. That the disk is full must not end the process here."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError:
            return len(data)


def _apply_environment() -> None:
    """Let packages that the fork server has imported follow variables that they read when they are imported."""
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # forks would draw the same numbers
    if (torch := sys.modules.get("torch")) is not None and (threads := os.environ.get("OMP_NUM_THREADS", "")).isdigit():
        torch.set_num_threads(int(threads))


def _picklable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - an exception of a user may refuse it in any way
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
