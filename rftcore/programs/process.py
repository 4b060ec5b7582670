"""`run_program`: a program under its supervisor, as seen by the explorer's event loop."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rftcore.failures import InfrastructureError
from rftdata.processes import kill_group

_SUPERVISOR = Path(__file__).with_name("supervisor.py")
_READ_BYTES = 65536
_END_S = 10.0

T = TypeVar("T")


@dataclass(frozen=True)
class Program:
    """What is run.

    Attributes:
        argv: the command and its arguments; no shell reads them.
        cwd: the folder in which it runs.
        env: all variables of its environment.
        input: its standard input.
        files: file descriptors that it inherits.
    """

    argv: Sequence[str]
    cwd: Path
    env: Mapping[str, str]
    input: str = ""
    files: Sequence[int] = ()


@dataclass(frozen=True)
class Report:
    """How a program ended.

    Attributes:
        code: its exit code; a negative one is the number of the signal that ended it.
        refused: why it could not be started; None if it was.
        stdout, stderr: the last 64 KiB of each.
    """

    code: int = 0
    refused: str | None = None
    stdout: str = ""
    stderr: str = ""


class RunningProgram:
    """A program and its supervisor.

    Attributes:
        report: how the program ended, once it has and nothing is left of it.
    """

    def __init__(self, supervisor: subprocess.Popen[bytes]) -> None:
        self._supervisor = supervisor
        self.report: asyncio.Future[Report] = asyncio.ensure_future(self._report())

    @classmethod
    async def start(cls, program: Program) -> RunningProgram:
        """Start a program. Its end is not awaited.

        Raises:
            InfrastructureError: the system starts no further process.
        """
        try:
            return cls(await _finished(asyncio.to_thread(_started, program)))
        except OSError as error:
            raise InfrastructureError(f"no process could be started: {type(error).__name__}: {error}") from error

    def ask_to_end(self) -> None:
        """Let the supervisor kill the program and all that it has started, without waiting."""
        assert self._supervisor.stdin is not None
        if not self._supervisor.stdin.closed:
            self._supervisor.stdin.close()

    def close(self) -> None:
        """Kill the program and all that it has started, and wait for their end; called in any thread."""
        self.ask_to_end()
        try:
            self._supervisor.wait(_END_S)
        except subprocess.TimeoutExpired:
            kill_group(self._supervisor)
            self._supervisor.wait()

    async def end(self) -> None:
        """Kill the program and all that it has started; return when they have ended."""
        self.ask_to_end()
        await asyncio.wait([self.report], timeout=_END_S)
        if not self.report.done():
            kill_group(self._supervisor)
            await asyncio.wait([self.report])

    async def _report(self) -> Report:
        data = await _all_of(self._supervisor)
        self.ask_to_end()
        await asyncio.to_thread(self._supervisor.wait)  # it has closed its output, and ends
        if not data.endswith(b"\n"):
            raise InfrastructureError("the supervisor of a program was killed")
        found: dict[str, Any] = json.loads(data)
        found.pop("num_bytes", None)
        return Report(**found)


@asynccontextmanager
async def run_program(program: Program) -> AsyncIterator[RunningProgram]:
    """Run a program within the context; at its end the program is killed with all that it has started."""
    running = await RunningProgram.start(program)
    try:
        yield running
    finally:
        await asyncio.shield(running.end())
        running.report.exception()  # it may not have been awaited


def _started(program: Program) -> subprocess.Popen[bytes]:
    supervisor = subprocess.Popen(
        [sys.executable, "-I", "-S", str(_SUPERVISOR)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=program.files,
        start_new_session=True,
    )
    spec = {
        "argv": list(program.argv),
        "cwd": str(program.cwd),
        "env": dict(program.env),
        "input": program.input,
        "files": list(program.files),
        "explorer": os.getpid(),
    }
    assert supervisor.stdin is not None
    try:
        supervisor.stdin.write(json.dumps(spec).encode() + b"\n")
        supervisor.stdin.flush()
    except BrokenPipeError:  # it was killed; the report says so
        pass
    return supervisor


async def _finished(started: Any) -> Any:
    """Await a start to its end; if this is cancelled meanwhile, end what was started."""
    task = asyncio.ensure_future(started)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(lambda done: done.exception() or done.result().stdin.close())
        raise


async def _all_of(supervisor: subprocess.Popen[bytes]) -> bytes:
    """Return all that a process prints; the event loop waits for it without a thread."""
    assert supervisor.stdout is not None
    loop, file = asyncio.get_running_loop(), supervisor.stdout.fileno()
    os.set_blocking(file, False)
    parts: list[bytes] = []
    ended: asyncio.Future[None] = loop.create_future()

    def read() -> None:
        try:
            data = os.read(file, _READ_BYTES)
        except BlockingIOError:
            return
        parts.append(data)
        if not data and not ended.done():
            ended.set_result(None)

    loop.add_reader(file, read)
    try:
        await ended
    finally:
        loop.remove_reader(file)
        supervisor.stdout.close()
    return b"".join(parts)
