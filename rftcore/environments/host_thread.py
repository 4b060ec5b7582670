"""The explorer's side of a host: a thread that starts it, sends it requests, and passes on what it reports.

The thread never waits for the host to read: it goes on reading what the host reports. Otherwise both would wait for each other as soon as many
requests and reports are on their way.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from rftcore.environments.errors import InfrastructureError
from rftdata.errors import PluginError
from rftdata.processes import await_exit, kill_group

_START_S = 120.0
_HOST = "rftcore.environments.host"  # not imported, because Python runs it as the main module
_EXIT_S = 5.0
_READ_BYTES = 65536
_PAUSE_MS = 20
_NO_THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

OnEnd = Callable[[int | InfrastructureError], None]
"""Receives how a process ended: exit code, or the negative number of a signal; or why it was not started."""


class HostThread:
    """One host, with its thread, which must live as long as the host.

    Args:
        name: of the environment.
        base_dir: folder that a path in the name is relative to.
        modules: imported before the environment, so that its processes share them.
    """

    def __init__(self, name: str, base_dir: Path, modules: Sequence[str]) -> None:
        self._name, self._base_dir, self._modules = name, base_dir, modules
        self.loaded: Future[bool] = Future()
        self.loaded.set_running_or_notify_cancel()  # the end of one that waits must not cancel it
        """Whether the host runs the environment; false if it belongs into the event loop. Raises why it does not load."""
        self._lock = threading.Lock()
        self._requests: deque[tuple[bytes, list[int]]] = deque()
        self._on_end: dict[int, OnEnd] = {}
        self._num_forked = 0
        self._wake, self._woken = socket.socketpair()
        self._is_closing = False
        self.has_ended = False
        self._thread = threading.Thread(target=self._run, name=f"environment {name}", daemon=True)
        self._thread.start()

    def fork(self, connection: socket.socket, stacks: int, on_end: OnEnd) -> int:
        """Let the host fork a process; return its key.

        Args:
            connection, stacks: passed to the process, and closed here.
            on_end: called once, from the host's thread.
        """
        with self._lock:
            key = self._num_forked = self._num_forked + 1
            files = [connection.detach(), stacks]
            if not self.has_ended:
                self._on_end[key] = on_end
                self._requests.append((_line("fork", key), files))
                self._wake_up()
                return key
        for file in files:
            os.close(file)
        on_end(InfrastructureError(f"the host process of the environment {self._name!r} has ended"))
        return key

    def end(self, key: int, after_s: float) -> None:
        """End a process after a time that it has to close its environment."""
        self._send("end", key, after_s)

    def end_with_stack(self, key: int) -> None:
        """Let a process write its stacks, and end it."""
        self._send("stack", key)

    def close(self) -> None:
        """End the host and its processes. Those that are closing their environments have up to 2 s."""
        self._is_closing = True
        self._wake_up()
        self._thread.join()

    def _send(self, *request: object) -> None:
        with self._lock:
            if not self.has_ended:
                self._requests.append((_line(*request), []))
                self._wake_up()

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):  # a full buffer wakes it, too
            self._wake.send(b"w", socket.MSG_DONTWAIT)

    def _run(self) -> None:
        ours, theirs = socket.socketpair()
        why: BaseException = InfrastructureError(f"the host process of the environment {self._name!r} did not start")
        try:
            with ours, theirs:
                process = _start(theirs.fileno())
                try:
                    theirs.close()
                    why = self._serve(_Connection(ours), process)
                finally:
                    ours.close()
                    if not await_exit(process, _EXIT_S if self.loaded.done() else 0.0):
                        kill_group(process)
                    process.wait()
        except BaseException as error:  # noqa: BLE001 - those who wait get it
            why = error
        finally:
            self._end(why)

    def _serve(self, connection: _Connection, process: subprocess.Popen[bytes]) -> BaseException:
        """Talk with the host until it ends or is no longer needed; return the reason."""
        request = {"name": self._name, "base_dir": str(self._base_dir), "modules": list(self._modules)}
        connection.send(json.dumps({**request, "parent": os.getpid(), "start_s": _START_S}).encode() + b"\n", [])
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        try:
            while not self._is_closing:
                waits = not self._send_requests(connection) and not connection.is_refused
                poll.register(connection.socket, select.POLLIN | (select.POLLOUT if waits else 0))
                ready = dict(poll.poll(_PAUSE_MS if connection.is_refused else None))
                if self._woken.fileno() in ready:
                    self._woken.recv(_READ_BYTES)
                if ready.get(connection.socket.fileno(), 0) & ~select.POLLOUT:
                    for event in connection.receive():
                        if reason := self._handle(*event):
                            return reason
        except (EOFError, OSError):
            return self._ended(process)
        return InfrastructureError(f"the environment {self._name!r} was closed, because the explorer is stopping")

    def _send_requests(self, connection: _Connection) -> bool:
        """Send what the host takes; return whether that is all."""
        while self._requests and self.loaded.done():
            line, files = self._requests[0]
            if not connection.send(line, files):
                return False
            self._requests.popleft()
            for file in files:
                os.close(file)
        return connection.send(b"", [])

    def _handle(self, kind: str, *details: Any) -> BaseException | None:
        """Handle an event; return why the host is not needed, if so."""
        if kind == "loaded":
            self.loaded.set_result(True)
            self._wake_up()
        elif kind == "in_loop":
            self.loaded.set_result(False)
            return InfrastructureError(f"the environment {self._name!r} has no host")
        elif kind == "failed":
            what, allowed, todo = details
            return PluginError(what, allowed=allowed, todo=todo)
        else:
            key, status = details
            if kind == "refused":
                status = InfrastructureError(f"no process for the environment {self._name!r}: {status}")
            if on_end := self._on_end.pop(key, None):
                on_end(status)
        return None

    def _ended(self, process: subprocess.Popen[bytes]) -> BaseException:
        """Return why the host has ended by itself."""
        if not await_exit(process, _EXIT_S):
            kill_group(process)
        code = process.wait()
        how = f"signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exit code {code}"
        if self.loaded.done() or code == -signal.SIGKILL:
            return InfrastructureError(f"the host process of the environment {self._name!r} ended with {how}")
        return PluginError(
            f"the process that imports the environment {self._name!r} ended with {how}",
            allowed=f"an import that returns within {_START_S:g} s and does not end its process",
            todo="see the explorer's log for what it printed, and correct the module",
        )

    def _end(self, why: BaseException) -> None:
        """Report the end to all who wait."""
        with self._lock:
            self.has_ended = True
            requests, self._requests = self._requests, deque()
            callbacks, self._on_end = list(self._on_end.values()), {}
        for file in (file for _, files in requests for file in files):
            os.close(file)
        self._wake.close()
        self._woken.close()
        if not self.loaded.done():
            self.loaded.set_exception(why)
        ended = why if isinstance(why, InfrastructureError) else InfrastructureError(f"{type(why).__name__}: {why}")
        for on_end in callbacks:
            on_end(ended)


class _Connection:
    """Lines of JSON over a socket, sent without a wait.

    Attributes:
        is_refused: whether the system refused to send, because too many files are on their way; it does not say when that is over.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.is_refused = False
        self._read = self._unsent = b""

    def send(self, line: bytes, files: list[int]) -> bool:
        """Send the rest of earlier lines, and this one; return whether it was taken. Its end may be sent with the next one."""
        self.is_refused = False
        try:
            while self._unsent:
                self._unsent = self._unsent[self.socket.send(self._unsent) :]
            if line:
                self._unsent = line[socket.send_fds(self.socket, [line], files) if files else self.socket.send(line) :]
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:
                raise
            self.is_refused = True
            return False
        return True

    def receive(self) -> list[list[Any]]:
        """Return the events that have come.

        Raises:
            EOFError: the host has closed the connection.
        """
        try:
            data = self.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        if not data:
            raise EOFError
        *lines, self._read = (self._read + data).split(b"\n")
        return [json.loads(line) for line in lines]


def _line(*request: object) -> bytes:
    return json.dumps(request).encode() + b"\n"


def _start(descriptor: int) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(folder for folder in sys.path if folder)
    # -P: a file in the current folder must not replace a module of the same name.
    return subprocess.Popen(
        [sys.executable, "-P", "-m", _HOST, str(descriptor)],
        pass_fds=[descriptor],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        env={**_NO_THREADS, **os.environ, "PYTHONPATH": path},
    )
