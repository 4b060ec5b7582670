"""`VerifiersHost`: the process that runs episodes of an environment of the package verifiers, as seen by the explorer's event loop."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rftcore.failures import FunctionFailedError, InfrastructureError
from rftcore.programs.process import Program, RunningProgram
from rftdata.errors import ConfigError
from rftdata.tasks.verifiers import program_environment

_PROGRAM = Path(__file__).with_name("verifiers_program.py")
_LIMIT = 1 << 30


@dataclass(frozen=True)
class VerifiersSettings:
    """What determines a host.

    Attributes:
        python: the interpreter that has verifiers and the environment.
        environment: its id, or the name of a module in `folder`.
        args: its configuration, as verifiers' `[env]` has it, without the id of the taskset.
        folder: that of the configuration file; modules there can be imported.
        start_s: limit for the start.
    """

    python: Path
    environment: str
    args: Mapping[str, Any]
    folder: Path
    start_s: float

    @property
    def key(self) -> str:
        """Equal for settings that one host serves."""
        return json.dumps([str(self.python), self.environment, self.args], sort_keys=True)


class VerifiersHost:
    """One process for many episodes at a time.

    Attributes:
        roles: of an environment with several agents, the role for which each name of a model stands.
    """

    def __init__(self, settings: VerifiersSettings, running: RunningProgram) -> None:
        self._settings, self._running = settings, running
        self._writer: asyncio.StreamWriter | None = None
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._num = 0
        self.roles: dict[str, str] = {}
        self._reading: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, settings: VerifiersSettings) -> VerifiersHost:
        """Start a host whose environment is loaded.

        Raises:
            ConfigError: the environment does not load, or takes longer than allowed.
            InfrastructureError: no process could be started.
        """
        ours, theirs = socket.socketpair()
        try:
            env = {
                **program_environment(settings.python, settings.folder.absolute()),
                "RFT_CHANNEL": str(theirs.fileno()),
            }
            argv = [str(settings.python), "-P", str(_PROGRAM)]
            running = await RunningProgram.start(Program(argv, settings.folder, env, files=[theirs.fileno()]))
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        host = cls(settings, running)
        try:
            await host._open(ours)
        except BaseException:
            if host._writer is not None:
                host._writer.close()
            await asyncio.shield(running.end())
            raise
        return host

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended, or ends."""
        return self._running.report.done() or self._reading is None or self._reading.done()

    async def run(self, data: Mapping[str, Any], base_url: str, model: str) -> dict[str, Any]:
        """Run an episode of a task; return its errors and traces.

        Raises:
            InfrastructureError: the process ended.
        """
        self._num += 1
        number = self._num
        waiting: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = waiting
        try:
            await self._send({"number": number, "data": data, "base_url": base_url, "model": model})
            return await waiting
        except ConnectionError as error:
            raise await self._ended() from error
        except asyncio.CancelledError:
            self._write({"number": number})
            raise
        finally:
            self._waiting.pop(number, None)

    def close(self) -> None:
        """End the process with all its episodes; called in any thread."""
        self._running.close()

    async def _open(self, ours: socket.socket) -> None:
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=_LIMIT)
        settings = self._settings
        try:
            async with asyncio.timeout(settings.start_s):
                args = {"environment": settings.environment, "args": settings.args}
                try:
                    await self._send(args)
                    line = await reader.readline()
                except ConnectionError:
                    line = b""
        except TimeoutError:
            raise self._refusal(f"did not start within workflow_args.start_s = {settings.start_s:g} s", "") from None
        if not line:
            report = await self._running.report
            raise self._refusal("does not load", report.refused or report.stderr.strip()[-2000:])
        found = json.loads(line)
        if found["type"] != "ready":
            raise self._refusal(f"does not load: {found['type']}: {found['message']}", found["stack"])
        self.roles = found["roles"]
        self._reading = asyncio.create_task(self._read(reader))

    def _refusal(self, what: str, stack: str) -> ConfigError:
        return ConfigError(
            f"the verifiers environment {self._settings.environment!r} {what}{os.linesep if stack else ''}{stack}",
            value=str(self._settings.python),
            todo="correct workflow_args; python must be the interpreter of a virtual environment with verifiers 0.4",
        )

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                found = json.loads(line)
                waiting = self._waiting.get(found.pop("number"))
                if waiting is not None and not waiting.done():
                    waiting.set_result(found)
        except ConnectionError:
            pass
        finally:
            assert self._writer is not None
            self._writer.close()
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(ConnectionResetError("the host of verifiers ended"))

    async def _send(self, message: Mapping[str, Any]) -> None:
        self._write(message)
        assert self._writer is not None
        await self._writer.drain()

    def _write(self, message: Mapping[str, Any]) -> None:
        assert self._writer is not None
        self._writer.write(json.dumps(message).encode() + b"\n")

    async def _ended(self) -> InfrastructureError:
        """Return the error of an episode whose process has ended."""
        report = await asyncio.shield(self._running.report)
        last = report.stderr.strip()[-2000:]
        return InfrastructureError(f"the process of verifiers ended with code {report.code}: {last}")


def episode_failure(errors: list[dict[str, str]]) -> Exception:
    """Return the error of an episode, with verifiers' own stack."""
    error = errors[-1]
    text = f"{error['type']}: {error['message']}"
    if error["type"] in ("SandboxError", "TunnelError", "InterceptionError"):
        return InfrastructureError(text)
    return FunctionFailedError(text, error["stack"])
