"""Processes that run `rft`, or a function, forked from one that has imported everything: a start takes milliseconds, not seconds of a core.

    python -m tests.support.preloaded FD

Each process of a test session has one such server, which ends with it. What is forked behaves like `python -m rftcore`: it has its own
arguments, variables, working folder and files. It differs in what a process reads when it is imported or executed: its command line and
the environment in /proc are the server's, and modules that read a variable at import have read the server's. Tests of these start a process
by `subprocess`.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rftcore.garbage import collect_rarely, large_imports
from rftcore.parent_process import end_with_parent

CHECKOUT = Path(__file__).resolve().parents[2]
_MODULES = (
    "rftcore.cli",
    "rftcore.launch.supervisor",
    "rftcore.launch.staged_runs",
    "rftcore.launch.local_processes.launcher",
    "rftcore.explorer.role",
    "rftcore.pipeline.role",
    "rftcore.trainer.role",
    "rftcore.engines.transformers_engine",
    "transformers.models.llama.modeling_llama",
    "transformers.generation.utils",
)
_REQUEST = struct.Struct("!I")


class Preloaded(subprocess.Popen[Any]):
    """A forked process that runs `rft`; used like `subprocess.Popen`.

    Args:
        arguments: of `rft`.
        options: of `subprocess.Popen`; `env`, `cwd`, `stdin`, `stdout`, `stderr`, `text` and `start_new_session` among them.
    """

    def __init__(self, arguments: Sequence[object], **options: Any) -> None:
        super().__init__(list(map(str, arguments)), **options)

    def _work(self) -> list[str] | bytes:
        """What the process does: arguments of `rft`, or a pickled call."""
        return list(self.args)

    def _execute_child(
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any, env: Any, *rest: Any
    ) -> None:
        # In the place of the fork and exec of Python 3.11 to 3.13.
        pipes, apart = rest[3:9], rest[14]
        assert executable is None and preexec_fn is None and not pass_fds, "not possible with a forked process"
        self._ends, report = os.pipe()
        child_ends = pipes[0], pipes[3], pipes[5]  # -1: those of this process
        files = [*(number if end == -1 else end for number, end in enumerate(child_ends)), report]
        try:
            self.pid = _server().fork(
                self._work(), dict(os.environ if env is None else env), str(cwd or os.getcwd()), apart, files
            )
            self._child_created = True
        finally:
            os.close(report)
            self._close_pipe_fds(*pipes)

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        return self._read_status(0)

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        before = self.returncode
        if before is None and self._read_status(0 if wait_flags == os.WNOHANG else None) is None:
            return 0, 0
        code, self.returncode = self.returncode, before
        return self.pid, -code if code < 0 else code << 8

    def _read_status(self, timeout_s: float | None) -> int | None:
        """Return the code of a process that has ended, as `Popen.returncode`."""
        if self.returncode is None and select.select([self._ends], [], [], timeout_s)[0]:
            answer = os.read(self._ends, 4)
            os.close(self._ends)
            # Nothing is written if the server itself was killed.
            self.returncode = struct.unpack("!i", answer)[0] if answer else -signal.SIGKILL
        return self.returncode


class PreloadedCall(Preloaded):
    """A forked process that calls a function, and ends with this one; its exit code is 0 if the function returns.

    Args:
        function: of a module.
        arguments: of the function; they are pickled.
        options: see `Preloaded`.
    """

    def __init__(self, function: Callable[..., object], *arguments: object, **options: Any) -> None:
        self._call = pickle.dumps((function, arguments))
        super().__init__([function.__qualname__], **options)

    def _work(self) -> bytes:
        return self._call


class _Server:
    """The server of this process."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                cwd=CHECKOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                # A variable that the product reads when it is imported must be that of the tests.
                env={
                    **os.environ,
                    "HF_HUB_OFFLINE": "1",
                    "OMP_WAIT_POLICY": "PASSIVE",
                    "KMP_BLOCKTIME": "0",
                    "TOKENIZERS_PARALLELISM": "false",
                },
            )
        self._socket, self._lock, self.owner = ours, threading.Lock(), os.getpid()

    def fork(
        self, work: list[str] | bytes, environment: dict[str, str], folder: str, apart: bool, files: list[int]
    ) -> int:
        """Start a process; return its id. The last of the files receives its exit code."""
        request = pickle.dumps((work, environment, folder, apart))
        with self._lock:
            socket.send_fds(self._socket, [_REQUEST.pack(len(request))], files)
            self._socket.sendall(request)
            return _REQUEST.unpack(_received(self._socket, _REQUEST.size))[0]

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


_started: _Server | None = None
_starting = threading.Lock()


def _server() -> _Server:
    global _started
    with _starting:
        if _started is None or _started.owner != os.getpid():
            _started = _Server()
            atexit.register(_started.close)
        return _started


def _received(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def _serve(connection: socket.socket) -> Mapping[str, Any] | None:
    """Fork what is asked for, and report the end of each; return in a forked process, with what it runs, and at the end, with None."""
    statuses: dict[int, tuple[int, int]] = {}  # pidfd: process, where its end is reported
    while True:
        ready, _, _ = select.select([connection, *statuses], [], [])
        for pidfd in set(ready) - {connection}:
            pid, report = statuses.pop(pidfd)
            os.close(pidfd)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with contextlib.suppress(BrokenPipeError):
                os.write(report, struct.pack("!i", code))
            os.close(report)
        if connection not in ready:
            continue
        head, files, _, _ = socket.recv_fds(connection, _REQUEST.size, 4)
        if not head:
            return None
        work, environment, folder, apart = pickle.loads(_received(connection, _REQUEST.unpack(head)[0]))
        if (pid := os.fork()) == 0:
            connection.close()
            for pidfd, (_, report) in statuses.items():
                os.close(pidfd)
                os.close(report)
            return {
                "work": work,
                "environment": environment,
                "folder": folder,
                "apart": apart,
                "files": files,
            }
        statuses[os.pidfd_open(pid)] = pid, files.pop()
        for descriptor in files:
            os.close(descriptor)
        connection.sendall(_REQUEST.pack(pid))


def _become(
    server: int, work: list[str] | bytes, environment: dict[str, str], folder: str, apart: bool, files: list[int]
) -> None:
    """Be a process that runs `rft`, or calls a function."""
    if apart:
        os.setsid()
    for number, descriptor in enumerate(files[:3]):
        os.dup2(descriptor, number)
    for descriptor in files:
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    try:
        if isinstance(work, bytes):
            end_with_parent(server)
            function, arguments = pickle.loads(work)
            function(*arguments)
        else:
            _run_rft(work, environment, folder)
        code: object = 0
    except SystemExit as error:
        code = error.code
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
        code = 1
    # The end of an interpreter, without the destruction of a million objects of imported modules.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _run_rft(arguments: list[str], environment: dict[str, str], folder: str) -> None:
    sys.argv[:] = ["rft", *arguments]
    sys.path[0] = folder  # as `python -m` has it
    from rftcore.command import main as rft
    from rftdata import failpoints

    failpoints.arm(environment.get("RFT_FAILPOINT"))
    rft()


def main() -> None:
    """Serve until the other end of the socket is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the session, which closes the socket
    connection = socket.socket(fileno=int(sys.argv[1]))
    collect_rarely()
    with large_imports():
        for module in _MODULES:
            importlib.import_module(module)
    server = os.getpid()
    forked = _serve(connection)
    if forked is not None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _become(server, **forked)


if __name__ == "__main__":
    main()
