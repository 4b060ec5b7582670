"""A process that imports what roles need, once, and forks a process for each role.

Importing torch and transformers takes each process seconds of a core. The fork server is forked when `rft run` begins, and imports them
while the run is prepared. A role that it forks works at once, and roles share the memory of the imported modules.

A role that imports more, as an explorer does with vLLM, is forked before its task is known (`preload`), and imports it beside the checks. It gets its
task if it was preloaded with the same environment. Otherwise, or if it has ended, another process is forked for the task.

The fork server starts no thread and computes nothing, so that its forks are safe. It passes on pickled tasks and errors without opening them.
It ends with `rft run`, and roles end with it, however that happens. A role has its own session, which signals to the process group of `rft run`
do not reach: `rft run` receives them, and asks the roles to stop. When a role ends, the processes in its session are killed.

Processes are forked directly, because children of `multiprocessing` cannot choose a start method, skip exit handlers, and are waited for at the
end of their parent.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path

from rftcore.garbage import collect_rarely, large_imports
from rftcore.launch.launcher import RoleTask
from rftcore.launch.local_processes import forked_process, role_process
from rftcore.launch.local_processes.children import Child, Preload, WaitingChild, fork, fork_waiting
from rftcore.parent_process import end_with_parent

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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


@dataclass(frozen=True)
class _Start:
    """A request to start a role.

    Attributes:
        task: pickled, with the path of its log.
    """

    key: int
    role: str
    environment: Mapping[str, str]
    task: bytes
    log: Path


@dataclass(frozen=True)
class _Kill:
    """A request to kill a role."""

    key: int


@dataclass(frozen=True)
class _Wait:
    """A request for processes that wait for tasks."""

    preloads: Sequence[Preload]


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
        self._send(_Start(key, task.role, task.environment, pickle.dumps((task, log)), log))

    def preload(self, preloads: Sequence[Preload]) -> None:
        """Fork processes that import modules and wait for tasks; end waiting processes that are not among them."""
        self._send(_Wait(preloads))

    def kill(self, key: int) -> None:
        """Kill a role's process and the others of its session; a role that is not forked yet is killed once it is."""
        self._send(_Kill(key))

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

    def _send(self, request: _Start | _Kill | _Wait) -> None:
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
    server = _Server(connection)
    for module in modules:
        with large_imports(), contextlib.suppress(Exception):  # the role imports it again, and reports the error
            importlib.import_module(module)
        server.fork_preloads()
    server.serve()


class _Server:
    """The work of the server's process."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._children: dict[int, Child] = {}
        self._waiting: list[WaitingChild] = []
        self._requests: list[_Start | _Kill | _Wait] = []  # that came during the imports, in their order

    def fork_preloads(self) -> None:
        """Fork the processes that were requested so far, between two imports: they do not wait for what only other roles need."""
        with contextlib.suppress(EOFError, OSError):  # `rft run` has ended, which `serve` finds, too
            while self._connection.poll():
                request = self._connection.recv()
                if isinstance(request, _Wait) and not self._requests:
                    self._preload(request.preloads)
                else:  # a role that was requested takes its process before one that is not needed is ended
                    self._requests.append(request)

    def serve(self) -> None:
        """Handle requests and the ends of processes, after the imports."""
        try:
            for request in self._requests:
                self._handle(request)
            while True:
                ends = [end for child in self._children.values() for end in child.ends()]
                ready = set(wait([self._connection, *ends, *(waiting.child.pidfd for waiting in self._waiting)]))
                self._handle_ends(ready)
                if self._connection in ready:
                    self._handle(self._connection.recv())
        except (EOFError, OSError):  # `rft run` has ended
            for child in (*self._children.values(), *(waiting.child for waiting in self._waiting)):
                child.kill()

    def _handle_ends(self, ready: Set[object]) -> None:
        for key, child in list(self._children.items()):
            if ready.isdisjoint(child.ends()):
                continue
            child.receive()
            if child.pidfd in ready:
                child.kill()  # what it started
                del self._children[key]
                self._connection.send((key, None, child.status(), child.raised))
        for waiting in [waiting for waiting in self._waiting if waiting.child.pidfd in ready]:
            self._waiting.remove(waiting)
            waiting.end()

    def _handle(self, request: _Start | _Kill | _Wait) -> None:
        if isinstance(request, _Start):
            self._start(request)
        elif isinstance(request, _Wait):
            self._preload(request.preloads)
        elif request.key in self._children:
            self._children[request.key].kill()

    def _start(self, request: _Start) -> None:
        """Start a role; if that is not possible, report that it ended without having started."""
        server = os.getpid()
        try:
            child = self._preloaded(request)
            if child is None:
                child = fork(lambda result: role_process.run(result, server, request.task))
        except OSError as error:
            self._connection.send((request.key, None, 1, role_process.pickled(error)))
            return
        self._children[request.key] = child
        self._connection.send((request.key, child.pid, 0, b""))

    def _preloaded(self, request: _Start) -> Child | None:
        """Return the process that has waited for such a task, and has it now; None without one."""
        for waiting in list(self._waiting):
            if (waiting.preload.role, waiting.preload.environment) == (request.role, request.environment):
                self._waiting.remove(waiting)
                if waiting.give(request.task, request.log):
                    return waiting.child
                waiting.end()
        return None

    def _preload(self, preloads: Sequence[Preload]) -> None:
        missing = list(preloads)
        for waiting in list(self._waiting):
            if waiting.preload in missing:
                missing.remove(waiting.preload)
            else:
                self._waiting.remove(waiting)
                waiting.end()
        for preload in missing:
            with contextlib.suppress(OSError):  # the process of the task imports the modules
                self._waiting.append(fork_waiting(preload))
