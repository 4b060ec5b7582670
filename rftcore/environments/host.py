"""The host of an environment: a process that imports its class once, and forks a process for each rollout.

A fork takes a few milliseconds, and shares the memory of everything imported. The host runs no code of the environment except its import,
and starts no thread, so that its forks are safe. It has three duties:

- It forks, and reports each process that ends, with its exit code.
- It ends processes: with their stacks, at once, or after a time for `close`. All that a process has started ends with it: the process has
  a session, and orphans become children of the host, which kills them.
- It passes on what environments print, up to 64 KiB of each.

It ends when the explorer closes the connection or ends. If the host is killed, its processes are killed by the system.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rftcore.environments import process
from rftcore.environments.registry import EnvironmentClass, load_environment, runs_in_event_loop
from rftcore.parent_process import end_with_parent, outlive_parent
from rftdata.errors import RftError

_STACK_S = 1.0
_LAST_S = 2.0
_PRINTED_BYTES = 65536
_READ_BYTES = 65536
_OOM_SCORE = 500


@dataclass(eq=False)
class _Child:
    """The process of an environment.

    Attributes:
        output: what it prints; None once closed.
        left_bytes: of output that is still passed on.
        kill_at: when it is killed, by `time.monotonic()`; None without a request.
    """

    key: int
    pid: int
    pidfd: int
    output: int | None
    left_bytes: int = _PRINTED_BYTES
    kill_at: float | None = None

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.pid, signal.SIGKILL)  # it may not have a session yet
            os.killpg(self.pid, signal.SIGKILL)


class _Host:
    """The work of the host's process, after its imports.

    Args:
        explorer: process id of the explorer. Its end counts beside that of the connection, whose other end a fork of the explorer may hold.
    """

    def __init__(
        self, connection: socket.socket, explorer: int, name: str, environment_class: EnvironmentClass
    ) -> None:
        self._connection, self._name, self._class = connection, name, environment_class
        self._explorer = os.pidfd_open(explorer)
        self._pid = os.getpid()
        self._children: dict[int, _Child] = {}
        self._requests = b""
        self._files: list[int] = []
        self._poll = select.poll()
        for file in (connection.fileno(), self._explorer):
            self._poll.register(file, select.POLLIN)

    def serve(self) -> None:
        """Handle requests and the ends of processes, until the explorer closes the connection; then end all."""
        while self._handle(self._wait()):
            pass
        deadline = time.monotonic() + _LAST_S
        for child in self._children.values():
            if child.kill_at is None:
                child.kill()
            else:  # it closes its environment
                child.kill_at = min(child.kill_at, deadline)
        for file in (self._connection.fileno(), self._explorer):
            self._poll.unregister(file)
        while self._children:
            self._handle(self._wait())

    def _wait(self) -> set[int]:
        limits = [child.kill_at for child in self._children.values() if child.kill_at is not None]
        patience_ms = None if not limits else max(0.0, 1000 * (min(limits) - time.monotonic()))
        return {file for file, _ in self._poll.poll(patience_ms)}

    def _handle(self, ready: set[int]) -> bool:
        """Handle what is ready; return whether the explorer still needs the host."""
        now = time.monotonic()
        for child in list(self._children.values()):
            if child.output in ready:
                self._pass_on(child)
            if child.pidfd in ready:
                self._end(child)
            elif child.kill_at is not None and now >= child.kill_at:
                child.kill()
                child.kill_at = now + _STACK_S
        if self._explorer in ready:
            return False
        return self._connection.fileno() not in ready or self._receive()

    def _receive(self) -> bool:
        try:
            data, files, _, _ = socket.recv_fds(self._connection, _READ_BYTES, 16)
        except ConnectionError:
            return False
        self._files += files
        *lines, self._requests = (self._requests + data).split(b"\n")
        for line in lines:
            kind, key, *rest = json.loads(line)
            if kind == "fork":
                self._fork(key)
            elif key in self._children:
                self._stop(self._children[key], kind, *rest)
        return bool(data)

    def _stop(self, child: _Child, kind: str, seconds: float = 0.0) -> None:
        if kind == "stack":  # it writes its stacks and ends; if it cannot, it is killed
            os.kill(child.pid, process.STACK_SIGNAL)
            seconds = _STACK_S
        child.kill_at = time.monotonic() + seconds

    def _fork(self, key: int) -> None:
        connection, stacks, *self._files = self._files
        try:
            output, printed = os.pipe()
            try:
                pid = os.fork()
                if pid == 0:
                    self._run_child(socket.socket(fileno=connection), stacks, printed)
            except OSError:
                os.close(output)
                raise
            finally:
                os.close(printed)
            child = _Child(key, pid, os.pidfd_open(pid), output)
        except OSError as error:
            self._report("refused", key, f"{type(error).__name__}: {error}")
            return
        finally:
            os.close(connection)
            os.close(stacks)
        os.set_blocking(output, False)
        self._children[key] = child
        self._poll.register(child.pidfd, select.POLLIN)
        self._poll.register(output, select.POLLIN)

    def _run_child(self, connection: socket.socket, stacks: int, printed: int) -> None:
        try:
            os.setsid()
            end_with_parent(self._pid)
            process.become_subreaper()
            for number in (1, 2):
                os.dup2(printed, number)
            _close_files({0, 1, 2, connection.fileno(), stacks})
            with contextlib.suppress(OSError):  # the system may end an environment rather than the explorer
                Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE))
            process.serve(connection, stacks, self._class)
        finally:
            os._exit(1)

    def _pass_on(self, child: _Child) -> None:
        """Pass on what a process has printed; beyond the limit, drop it."""
        assert child.output is not None
        try:
            data = os.read(child.output, _READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._close_output(child)
            return
        if child.left_bytes <= 0:
            return
        kept = data[: child.left_bytes]
        child.left_bytes -= len(data)
        if child.left_bytes <= 0:
            kept += f"\n[the environment {self._name!r} prints more; it is left out]\n".encode()
        with contextlib.suppress(OSError):  # of a full disk
            os.write(2, kept)

    def _end(self, child: _Child) -> None:
        """Report a process that has ended, and end what it has left."""
        child.kill()  # the others of its session, while no other process can have its id
        if child.output is not None:
            self._pass_on(child)
        if child.output is not None:
            self._close_output(child)
        self._poll.unregister(child.pidfd)
        os.close(child.pidfd)
        status = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
        del self._children[child.key]
        self._kill_orphans()
        self._report("ended", child.key, status)

    def _close_output(self, child: _Child) -> None:
        assert child.output is not None
        self._poll.unregister(child.output)
        os.close(child.output)
        child.output = None

    def _kill_orphans(self) -> None:
        """Kill children that the host has not forked: processes that an ended one had started."""
        known = {child.pid for child in self._children.values()}
        while orphans := _children_of_this_process() - known:
            for pid in orphans:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def _report(self, *event: object) -> None:
        with contextlib.suppress(OSError):  # the explorer has closed the connection
            self._connection.sendall(json.dumps(event).encode() + b"\n")


def _children_of_this_process() -> set[int]:
    try:
        return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}
    except OSError:  # a kernel without this file
        return set()


def _close_files(kept: set[int]) -> None:
    for descriptor in {int(name) for name in os.listdir("/proc/self/fd")} - kept:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def _load(connection: socket.socket, request: dict[str, Any]) -> EnvironmentClass | None:
    """Import the class and report whether it runs here; None if it does not, or if it cannot be imported."""
    name = request["name"]
    faulthandler.dump_traceback_later(request["start_s"], exit=True)
    found: EnvironmentClass | None = None
    try:
        for module in request["modules"]:
            importlib.import_module(module)
        loaded = load_environment(name, Path(request["base_dir"]), loading_s=None)
        if "numpy" in sys.modules:  # which imports its generators late
            importlib.import_module("numpy.random")
        if runs_in_event_loop(loaded):
            answer: list[Any] = ["in_loop"]
        else:
            found, answer = loaded, ["loaded"]
    except RftError as error:
        answer = ["failed", error.what, error.allowed, error.todo]
    faulthandler.cancel_dump_traceback_later()
    others = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if found is not None and others:
        print(
            f"the import of the environment {name!r} has started threads ({', '.join(others)}), which forks of the process do not have; "
            "start them in reset or in the constructor",
            file=sys.stderr,
            flush=True,
        )
    connection.sendall(json.dumps(answer).encode() + b"\n")
    return found


def main(descriptor: int) -> None:
    """Run the host.

    Args:
        descriptor: of the connection to the explorer. The first line is the request to load a class.
    """
    connection = socket.socket(fileno=descriptor)
    line = b""
    while not line.endswith(b"\n"):
        if not (data := connection.recv(1)):
            return
        line += data
    request = json.loads(line)
    end_with_parent(request["parent"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    found = _load(connection, request)
    if found is None:
        return
    # From here on the end of the connection ends the host, so that it can end what environments have started.
    outlive_parent()
    process.become_subreaper()
    gc.collect()
    gc.freeze()  # a collection in a fork must not copy the shared memory
    _Host(connection, request["parent"], request["name"], found).serve()


if __name__ == "__main__":
    main(int(sys.argv[1]))
