"""A process that imports what roles need, once, and forks a process for each role.

Importing torch and transformers takes seconds of a core for each process. The fork server is forked when `rft run` begins and imports them
while the run is prepared. A role that it forks works at once, and roles share the memory of what was imported.

What always holds: the fork server starts no thread and computes nothing, so that its forks are safe; it passes on what roles and `rft run` send
without opening it. It ends with `rft run`, and roles end with it, however that happens. A role has a session of its own, which signals to the
process group of `rft run` do not reach: `rft run` receives them, and asks the roles to stop. When a role ends, what it started in its session
is killed. What a role prints is in its log file.

Processes are forked directly, not by `multiprocessing`, whose children cannot choose a start method, leave out exit handlers, and are waited for
at the end of their parent.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import io
import os
import pickle
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from rftcore import stuck_threads
from rftcore.garbage import collect_rarely, large_imports
from rftcore.launch.launcher import RoleTask, run_role
from rftcore.run.parent_process import end_with_parent
from rftdata.errors import RftError

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TERMINATED = 128 + signal.SIGTERM
"""Exit code of a role that SIGTERM ended."""
_PR_SET_NAME = 15
# As Ray does for its workers: for lack of memory the system ends a role, which can be started again, rather than the database.
_OOM_SCORE = "500"
_OPEN_FILES = 65536


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
        self._connection, theirs = Pipe()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the server
        self._status: int | None = None
        parent = os.getpid()
        # Until the child ignores them, a signal to the group would end it, or run a handler of this process in it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
        try:
            self.pid = os.fork()
            if not self.pid:
                output = self._output.fileno()
                _end_with(lambda: _serve(theirs, parent, output, modules, environment))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()

    def start(self, key: int, task: RoleTask, log: Path) -> None:
        """Fork a process for a role; `events` returns that it has started, and later that it has ended.

        Args:
            key: names the process in events.
            log: file to which it appends what it prints.
        """
        self._send((key, pickle.dumps((task, log))))

    def kill(self, key: int) -> None:
        """Kill a role's process and what it started in its session, also if it is still to be forked."""
        self._send((key, None))

    def events(self, timeout_s: float) -> list[Started | Ended]:
        """Wait for a short time for events; return them in their order."""
        found: list[Started | Ended] = []
        try:
            while self._connection.poll(0 if found else timeout_s):
                found.append(_event(*self._connection.recv()))
        except (EOFError, OSError):
            self._await_end(timeout_s)
        return found

    @property
    def exit_status(self) -> int | None:
        """How the server ended: its exit code, or the negative number of a signal; None while it runs."""
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status

    def last_words(self) -> str:
        """Return the last line that the server printed, which is that of an error; empty if there is none."""
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def close(self) -> None:
        """End the server at once, and its roles with it."""
        self._connection.close()
        if self.exit_status is None:  # else its number may be another process's
            os.kill(self.pid, signal.SIGKILL)
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._output.close()

    def _send(self, request: tuple[int, bytes | None]) -> None:
        with contextlib.suppress(OSError):  # the server has ended, which `exit_status` tells
            self._connection.send(request)

    def _await_end(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self.exit_status is None and time.monotonic() < deadline:
            time.sleep(0.01)


def _event(key: int, pid: int | None, status: int, raised: bytes) -> Started | Ended:
    """Read an event as the server sends it."""
    if pid is not None:
        return Started(key, pid)
    if not raised:
        return Ended(key, status, None)
    pickled, text = pickle.loads(raised)
    try:
        return Ended(key, status, pickle.loads(pickled))
    except Exception:  # noqa: BLE001 - its class may be in a module of the user that only the role has
        return Ended(key, status, RuntimeError(text))


@dataclass
class _Child:
    """A role's process, as the server sees it.

    Attributes:
        pidfd: readable once it has ended.
        result: receives what it raised.
        raised: what it has received.
    """

    key: int
    pid: int
    pidfd: int
    result: Connection
    raised: bytes = b""

    def ends(self) -> list[int | Connection]:
        """Return what becomes readable when there is something to receive."""
        return [self.pidfd] if self.result.closed else [self.pidfd, self.result]

    def receive(self) -> None:
        """Take what the role has raised, if it has arrived."""
        if not self.result.closed and self.result.poll():
            with contextlib.suppress(EOFError, OSError), self.result:
                self.raised = self.result.recv_bytes()

    def kill(self) -> None:
        """Kill the role and what it started in its session. Its number is its own until `status` is called."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.pid, signal.SIGKILL)  # it may not have a session yet
            os.killpg(self.pid, signal.SIGKILL)

    def status(self) -> int:
        """Return how the role has ended, as `Ended.status`."""
        os.close(self.pidfd)
        self.result.close()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _serve(
    connection: Connection, parent: int, output: int, modules: Sequence[str], environment: Mapping[str, str]
) -> None:
    """Be the fork server until the other end of the connection is closed, or its parent ends: a fork of the parent may have that end, too."""
    os.setsid()
    end_with_parent(parent)
    for number in _STOPS:  # to every process of a job or a machine: `rft run` decides what they mean
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
    _redirect(os.dup(output))
    _close_files([connection.fileno()])
    os.environ.update(environment)
    _raise_file_limit()
    collect_rarely()
    with large_imports():
        for module in modules:
            with contextlib.suppress(Exception):  # the role imports it again, and reports the error
                importlib.import_module(module)
    children: dict[int, _Child] = {}
    try:
        while True:
            ready = set(wait([connection, *(end for child in children.values() for end in child.ends())]))
            for child in [child for child in children.values() if not ready.isdisjoint(child.ends())]:
                child.receive()
                if child.pidfd in ready:
                    child.kill()  # what it started
                    del children[child.key]
                    connection.send((child.key, None, child.status(), child.raised))
            if connection in ready:
                key, task = connection.recv()
                if task is not None:
                    _start(children, connection, key, task)
                elif key in children:
                    children[key].kill()
    except (EOFError, OSError):  # `rft run` has ended
        for child in children.values():
            child.kill()


def _start(children: dict[int, _Child], connection: Connection, key: int, task: bytes) -> None:
    """Fork a role; if that is not possible, report that it ended without having started."""
    server = os.getpid()
    try:
        with contextlib.ExitStack() as undo:
            ours, theirs = Pipe(duplex=False)
            undo.callback(ours.close)
            with theirs:
                if (pid := os.fork()) == 0:
                    _end_with(lambda: _work(theirs, server, task))
            undo.callback(os.waitpid, pid, 0)
            undo.callback(os.kill, pid, signal.SIGKILL)
            child = _Child(key, pid, os.pidfd_open(pid), ours)
            undo.pop_all()
    except OSError as error:
        connection.send((key, None, 1, _pickled(error)))
        return
    children[key] = child
    connection.send((key, pid, 0, b""))


def _work(result: Connection, server: int, task_bytes: bytes) -> None:
    """Be the process of a role."""
    os.setsid()
    end_with_parent(server)
    task, log = pickle.loads(task_bytes)
    _redirect(_open_log(log))
    _close_files([result.fileno()])
    print(f"== {task.name}: process {os.getpid()}, {time.strftime('%Y-%m-%d %H:%M:%S %z')} ==", flush=True)
    # Handlers that do nothing, rather than ignored signals, which children of a role would inherit.
    for number, handler in ((signal.SIGTERM, _terminate), (signal.SIGINT, _pass), (signal.SIGHUP, _pass)):
        signal.signal(number, handler)
    os.environ.update(task.environment)
    _apply_environment()
    ctypes.CDLL(None).prctl(_PR_SET_NAME, f"rft {task.name}"[:15].encode())
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE, encoding="utf-8")
    try:
        code = run_role(task.role, task.config, task.run, task.options)
    except _TerminatedError:
        raise
    except BaseException as error:  # noqa: BLE001 - the boundary: the supervisor reports every error with the role's name
        if isinstance(error, SystemExit):
            error = RuntimeError(f"sys.exit({error.code!r}) was called")
        with contextlib.suppress(OSError):
            result.send_bytes(_pickled(error))
        if not isinstance(error, RftError):
            traceback.print_exc()
        code = 1
    sys.exit(code)


def _end_with(work: Callable[[], None]) -> NoReturn:
    """Do the work of a forked process and end it, as the interpreter would, but never return to what its parent was doing."""
    code = 1
    try:
        work()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
    finally:
        stuck_threads.set_exit_code(code)
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


class _TerminatedError(SystemExit):
    """SIGTERM ends a role as an error would, so that it leaves the run and releases what it has claimed."""


def _terminate(number: int, frame: FrameType | None) -> None:
    raise _TerminatedError(TERMINATED)


def _pass(number: int, frame: FrameType | None) -> None:
    """Leave a signal to `rft run`, which receives it, too, and asks the roles to stop."""


def _open_log(log: Path) -> int:
    """Open the file for what a process prints; where that is not possible, it is not kept."""
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        return os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)


def _close_files(kept: Sequence[int]) -> None:
    """Close the files of the parent, whose other ends wait for that."""
    for descriptor in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, *kept}:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def _redirect(output: int) -> None:
    """Let this process read nothing, and print into a file."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, targets in ((nothing, (0,)), (output, (1, 2))):
        for number in targets:
            os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - they stay open as long as the process
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(
            io.BufferedWriter(_Log(number, "w", closefd=False)),
            encoding="utf-8",
            errors="backslashreplace",
            line_buffering=True,
        )
        for number in (1, 2)
    )


class _Log(io.FileIO):
    """A file that a process prints into. That the disk is full must not end the process here."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError:
            return len(data)


def _raise_file_limit() -> None:
    """Let roles open as many files as the system allows; a shell's limit is for commands that read a few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _apply_environment() -> None:
    """Let packages that the fork server has imported follow what they read when they are imported."""
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # forks would draw the same numbers
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if not threads.isdecimal() or not int(threads):
        return
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(int(threads))
    if (pyarrow := sys.modules.get("pyarrow")) is not None:
        pyarrow.set_cpu_count(int(threads))


def _pickled(error: BaseException) -> bytes:
    """Return an error for `_event`: pickled, if that is possible, and in words."""
    text = f"{type(error).__name__}: {error}".encode(errors="backslashreplace").decode()
    try:
        return pickle.dumps((pickle.dumps(error), text))
    except Exception:  # noqa: BLE001 - an exception of a user may refuse it in any way
        return pickle.dumps((b"", text))
