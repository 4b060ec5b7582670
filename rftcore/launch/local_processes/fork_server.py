"""A process that imports what roles need, once, and forks a process for each role.

Importing torch and transformers takes each process seconds of a core. The fork server is forked when `rft run` begins, and imports them
while the run is prepared. A role that it forks works at once, and roles share the memory of the imported modules.

The fork server starts no thread and computes nothing, so that its forks are safe. It passes on pickled tasks and errors without opening them.
It ends with `rft run`, and roles end with it, however that happens. A role has its own session, which signals to the process group of `rft run`
do not reach: `rft run` receives them, and asks the roles to stop. When a role ends, the processes in its session are killed. The output of a
role is in its log file.

Processes are forked directly, because children of `multiprocessing` cannot choose a start method, skip exit handlers, and are waited for at the
end of their parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType

from rftcore.garbage import collect_rarely, large_imports
from rftcore.launch.launcher import RoleTask, run_role
from rftcore.launch.local_processes import forked_process
from rftcore.run.parent_process import end_with_parent
from rftdata.errors import RftError

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TERMINATED = 128 + signal.SIGTERM
"""Exit code of a role that SIGTERM ended."""
_PR_SET_NAME = 15
# As Ray does for its workers: for lack of memory the system kills a role, which can be restarted, rather than the database.
_OOM_SCORE = "500"


@dataclass(frozen=True)
class Started:
    """A role's process has started."""

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
        modules: imported by it; the role that needs a module which cannot be imported reports the error.
        environment: variables that must be set before the modules are imported.
    """

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        self._connection, theirs = Pipe()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the server
        self._status: int | None = None
        parent = os.getpid()
        # Until the child ignores signals, one to the group would end it, or run a handler of this process in it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
        try:
            self.pid = os.fork()
            if not self.pid:
                output = self._output.fileno()
                forked_process.exit_after(lambda: _serve(theirs, parent, output, modules, environment))
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
        """Kill a role's process and the others of its session; a role that is not forked yet is killed once it is."""
        self._send((key, None))

    def events(self, timeout_s: float) -> list[Started | Ended]:
        """Wait a short time for events; return them in order."""
        events: list[Started | Ended] = []
        try:
            while self._connection.poll(0 if events else timeout_s):
                events.append(_event(*self._connection.recv()))
        except (EOFError, OSError):
            self._await_end(timeout_s)
        return events

    @property
    def exit_status(self) -> int | None:
        """The server's exit code, or the negative number of the signal that ended it; None while it runs."""
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status

    def last_line(self) -> str:
        """Return the last line that the server printed, which names an error; empty if there is none."""
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def close(self) -> None:
        """End the server at once, and its roles with it."""
        self._connection.close()
        if self.exit_status is None:  # otherwise its id may be another process's
            os.kill(self.pid, signal.SIGKILL)
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._output.close()

    def _send(self, request: tuple[int, bytes | None]) -> None:
        with contextlib.suppress(OSError):  # the server has ended, see `exit_status`
            self._connection.send(request)

    def _await_end(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self.exit_status is None and time.monotonic() < deadline:
            time.sleep(0.01)


def _event(key: int, pid: int | None, status: int, raised: bytes) -> Started | Ended:
    """Return the event that a message of the server describes."""
    if pid is not None:
        return Started(key, pid)
    if not raised:
        return Ended(key, status, None)
    pickled, text = pickle.loads(raised)
    try:
        return Ended(key, status, pickle.loads(pickled))
    except Exception:  # noqa: BLE001 - only the role may have the module of its class
        return Ended(key, status, RuntimeError(text))


@dataclass
class _Child:
    """The server's record of a role's process.

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
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _serve(
    connection: Connection, parent: int, output: int, modules: Sequence[str], environment: Mapping[str, str]
) -> None:
    """Serve requests until the other end of the connection is closed or the parent ends, because forks of the parent may hold that end open."""
    os.setsid()
    end_with_parent(parent)
    for number in _STOPS:  # sent to every process of a job or machine; `rft run` decides what they mean
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
    forked_process.redirect(os.dup(output))
    forked_process.close_files([connection.fileno()])
    os.environ.update(environment)
    forked_process.raise_file_limit()
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
                    forked_process.exit_after(lambda: _work(theirs, server, task))
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
    """Run a role in its forked process."""
    os.setsid()
    end_with_parent(server)
    task, log = pickle.loads(task_bytes)
    forked_process.redirect(forked_process.open_log(log))
    forked_process.close_files([result.fileno()])
    print(f"== {task.name}: process {os.getpid()}, {time.strftime('%Y-%m-%d %H:%M:%S %z')} ==", flush=True)
    # Handlers that do nothing, rather than ignored signals, which children of a role would inherit.
    for number, handler in ((signal.SIGTERM, _terminate), (signal.SIGINT, _ignore), (signal.SIGHUP, _ignore)):
        signal.signal(number, handler)
    os.environ.update(task.environment)
    forked_process.apply_environment()
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


class _TerminatedError(SystemExit):
    """SIGTERM arrived. It ends a role like an error, so that the role leaves the run and releases its claims."""


def _terminate(number: int, frame: FrameType | None) -> None:
    raise _TerminatedError(TERMINATED)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing: `rft run` receives the signal too, and asks the roles to stop."""


def _pickled(error: BaseException) -> bytes:
    """Return an error for `_event`: pickled, if possible, and as text."""
    text = f"{type(error).__name__}: {error}".encode(errors="backslashreplace").decode()
    try:
        return pickle.dumps((pickle.dumps(error), text))
    except Exception:  # noqa: BLE001 - a user.s exception may fail to pickle in any way
        return pickle.dumps((b"", text))
