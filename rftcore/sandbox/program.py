"""`Program`: what runs in a sandbox; `RunningProgram`: one that runs; `Sandbox`: the interface of all kinds of sandboxes.

A sandbox of another kind (a container, a service) is a class whose constructor takes a `SandboxConfig`. It is named in `sandbox: {type: …}`, by its
path or by an entry point of the group `rftdata.sandbox`.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any, Protocol

from rftcore.failures import InfrastructureError
from rftcore.sandbox.request import Limits, Report, framed
from rftdata.errors import RftError

LARGEST_MESSAGE = 1 << 22
_LONGEST_POLL = 2**31 - 1  # milliseconds


class SandboxFailedError(InfrastructureError):
    """A sandbox could not be made, or has failed itself. It says nothing about the code."""


class ProgramEndedError(Exception):
    """A program ended, or took too long, before it answered; or its answer is no message."""


@dataclass(frozen=True)
class Program:
    """A program of Python or another language.

    Attributes:
        arguments: the program and its arguments. `{python}` stands for the interpreter, `{work}` for the working folder.
        files: files of the working folder, by relative path.
        stdin: its standard input.
        has_channel: whether it has a channel of messages to the caller: it reads file 3, and writes file 4.
        limits: in place of those of the configuration.
    """

    arguments: list[str]
    files: dict[str, bytes] = field(default_factory=dict)
    stdin: bytes = b""
    has_channel: bool = False
    limits: Limits | None = None

    def checked(self) -> Program:
        """Return it with normal paths.

        Raises:
            RftError: a path of a file leads out of the working folder.
        """
        files = {}
        for name, data in self.files.items():
            path = PurePosixPath(name)
            if path.is_absolute() or not path.parts or ".." in path.parts or "\0" in name:
                raise RftError(
                    "the path of a file leads out of the sandbox's working folder",
                    value=name,
                    allowed="a relative path without ..",
                )
            files[str(path)] = data
        return replace(self, files=files)


class Channel:
    """Messages to a program and from it: JSON values. What it sends is of the model's making, and nothing but data.

    Args:
        reads, writes: open files, which this object closes.
    """

    def __init__(self, reads: int, writes: int) -> None:
        self._reads, self._writes = reads, writes
        self._lock = threading.Lock()
        self._num_users, self._is_closed = 1, False  # a user is a call, and what has not closed it yet
        os.set_blocking(writes, False)

    def send(self, message: object, until: float) -> None:
        """Send a message.

        Args:
            until: time, as of `time.monotonic`, at which it gives up.

        Raises:
            ProgramEndedError: the program has ended or does not read.
        """
        with self._in_use():
            self._send(memoryview(framed(message)), until)

    def _send(self, view: memoryview, until: float) -> None:
        poll = select.poll()
        poll.register(self._writes, select.POLLOUT)
        while view:
            if not poll.poll(_milliseconds(until)):
                raise ProgramEndedError("it does not read its messages")
            try:
                view = view[os.write(self._writes, view) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise ProgramEndedError("it has ended") from error

    def receive(self, until: float) -> Any:
        """Return the next message.

        Raises:
            ProgramEndedError: the program has ended, sent something else, or takes too long.
        """
        with self._in_use():
            return self._receive(until)

    def _receive(self, until: float) -> Any:
        head = self._exactly(4, until)
        length = int.from_bytes(head, "big")
        if length > LARGEST_MESSAGE:
            raise ProgramEndedError(f"its message has {length} bytes, and {LARGEST_MESSAGE} are allowed")
        data = self._exactly(length, until)
        try:
            return parsed(data)
        except ValueError as error:
            raise ProgramEndedError("its message is no JSON") from error

    def close(self) -> None:
        """Close both files, when no thread uses them any more: another file may get their numbers at once."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._release()

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        with self._lock:
            if self._is_closed:
                raise ProgramEndedError("it has ended")
            self._num_users += 1
        try:
            yield
        finally:
            self._release()

    def _release(self) -> None:
        with self._lock:
            self._num_users -= 1
            if self._num_users:
                return
        os.close(self._reads)
        os.close(self._writes)

    def _exactly(self, length: int, until: float) -> bytes:
        data = bytearray()
        poll = select.poll()
        poll.register(self._reads, select.POLLIN)
        while len(data) < length:
            if not poll.poll(_milliseconds(until)):
                raise ProgramEndedError("it took too long")
            part = os.read(self._reads, min(length - len(data), 1 << 20))
            if not part:
                raise ProgramEndedError("it ended before it answered")
            data += part
        return bytes(data)


class RunningProgram(Protocol):
    """A program that runs. All of it is killed by `close`, and when the caller's process ends."""

    @property
    def channel(self) -> Channel:
        """Its channel of messages."""

    def wait(self) -> Report:
        """Wait for its end.

        Raises:
            SandboxFailedError: the sandbox failed.
        """

    def close(self) -> None:
        """Kill it, if it runs, and release what it holds."""


class Sandbox(Protocol):
    """Runs programs, any number at a time, from any thread."""

    @property
    def tier(self) -> str:
        """What confines the programs, for people: it is stored with the run."""

    def start(self, program: Program) -> RunningProgram:
        """Start a program, in a sandbox of its own.

        Raises:
            SandboxFailedError: it cannot be made.
        """

    def close(self) -> None:
        """End all programs."""


def run(sandbox: Sandbox, program: Program) -> Report:
    """Run a program to its end."""
    running = sandbox.start(program)
    try:
        return running.wait()
    finally:
        running.close()


def parsed(data: bytes) -> Any:
    """Return JSON that a program sent.

    Raises:
        ValueError: it is no JSON, or too deeply nested.
    """
    import json

    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("too deeply nested") from error


def _milliseconds(until: float) -> float:
    return min(_LONGEST_POLL, max(0.0, 1000 * (until - time.monotonic())))
