"""`HostProcess`: the caller's side of the host, and of each program that it runs."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import rftcore
from rftcore.sandbox.config import SandboxConfig
from rftcore.sandbox.interpreter import Interpreter
from rftcore.sandbox.program import Channel, Program, SandboxFailedError
from rftcore.sandbox.request import Report, Request, read_frame, write_all

_BOOT = "import sys; sys.path.insert(0, sys.argv.pop(1)); import runpy; runpy.run_module('rftcore.sandbox.host', run_name='__main__')"
_HOST_S = 60.0
_LONGEST_WAIT_S = 1e6  # sockets have no longer time-outs


def request_of(program: Program, config: SandboxConfig, interpreter: Interpreter, level: str) -> Request:
    """Return what the host is asked to run."""
    return Request(
        level=level,
        arguments=[each.replace("{python}", interpreter.path) for each in program.arguments],
        environment={
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": "{work}",
            "LANG": "C.UTF-8",
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            **({} if level in ("cgroup", "namespaces") else {"TMPDIR": "{work}"}),
        },
        files=program.files,
        limits=program.limits or config.limits,
        readable=[*interpreter.folders, *(os.path.abspath(path) for path in config.readable)],
    )


class HostProcess:
    """The process that forks supervisors. It starts with the first program, and again if it has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._owner = 0

    def start(self, request: Request, program: Program) -> RunningLocal:
        """Start a program.

        Raises:
            SandboxFailedError: the host does not start.
        """
        with contextlib.ExitStack() as for_host, contextlib.ExitStack() as on_error:
            try:
                ours, theirs = socket.socketpair()
                on_error.callback(ours.close)
                for_host.callback(theirs.close)
                given = [os.memfd_create("stdin", os.MFD_CLOEXEC)]
                for_host.callback(os.close, given[0])
                write_all(given[0], program.stdin)
                os.lseek(given[0], 0, os.SEEK_SET)
                channel = None
                if program.has_channel:
                    program_reads, we_write = os.pipe()
                    for_host.callback(os.close, program_reads)
                    on_error.callback(os.close, we_write)
                    we_read, program_writes = os.pipe()
                    for_host.callback(os.close, program_writes)
                    on_error.callback(os.close, we_read)
                    given += [program_reads, program_writes]
                    channel = Channel(we_read, we_write)
                self._hand_over([theirs.fileno(), *given])
                ours.settimeout(_HOST_S)
                ours.sendall(request.encoded())
            except OSError as error:
                raise SandboxFailedError(f"the sandbox's host does not answer: {error}") from error
            on_error.pop_all()
        wall_s = request.limits.wall_s
        ours.settimeout(wall_s + _HOST_S if 0 < wall_s < _LONGEST_WAIT_S else None)
        return RunningLocal(ours, channel)

    def close(self) -> None:
        """End the host and all programs."""
        with self._lock:
            self._end()

    def _hand_over(self, files: list[int]) -> None:
        with self._lock:
            if self._owner != os.getpid():  # a fork has its parent's connection
                self._process = self._connection = None
            for _ in range(2):
                if self._connection is None:
                    self._begin()
                assert self._connection is not None
                try:
                    socket.send_fds(self._connection, [b"start"], files)
                    return
                except (BrokenPipeError, ConnectionResetError):  # it was killed
                    self._end()
        raise BrokenPipeError("it ended twice")

    def _begin(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        root = str(Path(rftcore.__file__).parents[1])
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _BOOT, root, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={"LANG": "C.UTF-8"},
                cwd="/",
                start_new_session=True,
            )
        ours.settimeout(_HOST_S)
        self._connection, self._owner = ours, os.getpid()

    def _end(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None and self._owner == os.getpid():
            self._process.kill()
            self._process.wait()
        self._process = None


class RunningLocal:
    """A program that a supervisor watches."""

    def __init__(self, supervisor: socket.socket, channel: Channel | None) -> None:
        self._supervisor = supervisor
        self._channel = channel
        self._report: Report | None = None

    @property
    def channel(self) -> Channel:
        """The channel of messages."""
        assert self._channel is not None, "the program has no channel"
        return self._channel

    def wait(self) -> Report:
        """Wait for the end; see `RunningProgram.wait`."""
        if self._report is None:
            try:
                values = read_frame(self._supervisor.recv)
            except (OSError, ValueError) as error:
                raise SandboxFailedError(f"the sandbox's supervisor does not answer: {error}") from error
            if values is None:
                raise SandboxFailedError("the sandbox's supervisor ended without a report")
            report = Report.of(values)
            if report.refused is not None:
                raise SandboxFailedError(f"the sandbox could not be made: {report.refused}")
            self._report = report
        return self._report

    def close(self) -> None:
        """Kill it, if it runs, and close the files."""
        with contextlib.suppress(OSError):  # it has ended
            self._supervisor.shutdown(socket.SHUT_RDWR)  # a fork of this process may have a copy
        self._supervisor.close()
        if self._channel is not None:
            self._channel.close()
