"""Plain environments, each in a process that their host forks; here is the explorer's side of one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import pickle
import signal
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from rftcore.environments import process
from rftcore.environments.base import Observation, Step
from rftcore.environments.errors import EnvironmentFailedError, InfrastructureError
from rftcore.environments.handle import EnvironmentLimits, Facts
from rftcore.environments.host_thread import HostThread
from rftcore.environments.results import Json, observation_from_json, step_from_json
from rftcore.failures import as_traceback, dumped_frames, user_frames, user_line
from rftdata.errors import ConfigError, RftError

logger = logging.getLogger(__name__)

_MAX_ANSWER_BYTES = 32 << 20
_LAST_ANSWER_S = 0.05  # an answer that was written before the process ended may be read after its end is known
_STACK_S = 5.0


class ProcessPlace:
    """An environment in a process of its own, of one event loop.

    Args:
        on_end: called in the event loop once the process has ended.
    """

    def __init__(self, name: str, host: HostThread, limits: EnvironmentLimits, on_end: Callable[[], None]) -> None:
        self._name, self._host, self._limits, self._on_end = name, host, limits, on_end
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._status: int | InfrastructureError | None = None
        self._is_closed = False
        try:
            with contextlib.ExitStack() as undo:
                self._stacks = os.memfd_create("stacks", os.MFD_CLOEXEC)
                undo.callback(os.close, self._stacks)
                ours, theirs = map(undo.enter_context, socket.socketpair())
                stacks = os.dup(self._stacks)
                undo.pop_all()
        except OSError as error:
            raise InfrastructureError(f"no process for the environment {name!r}: {error}") from error
        self._channel = _Channel(ours)
        self._key = host.fork(theirs, stacks, self._report_end)

    async def make(self, args: Mapping[str, Any]) -> Facts:
        await self._channel.open()
        roles, deterministic = await self._call("make", (dict(args),), "its constructor")
        return Facts(tuple(roles), deterministic)

    async def reset(self, task: Any, seed: int) -> tuple[Observation, Sequence[Any]]:
        seen, tools = await self._call("reset", (task, seed), "reset")
        return observation_from_json(seen), tools

    async def step(self, action: Any, role: str, number: int) -> Step:
        return step_from_json(await self._call("step", (action, role), f"step {number}"))

    async def close(self) -> None:
        if self._is_closed:
            return
        if self._status is not None:
            self.abandon()
            return
        try:
            await self._call("close", (), "close")
        except (RftError, EnvironmentFailedError, InfrastructureError) as error:
            logger.warning("the environment %r failed in close: %s", self._name, error)
        finally:
            self.abandon()

    def abandon(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._status is None:
            with contextlib.suppress(OSError):
                self._channel.send("close", ())
            self._host.end(self._key, self._limits.close_s)
        self._channel.close()
        os.close(self._stacks)

    async def _call(self, method: str, arguments: tuple[Any, ...], what: str) -> Json:
        seconds, limit = self._limits.of(method)
        answer = self._channel.request(method, arguments)
        if self._status is not None:
            self._fail_later()
        # `asyncio.timeout` would also discard an answer that comes in the same moment.
        done, _ = await asyncio.wait({answer}, timeout=seconds)
        if not done:
            answer.cancel()
            raise await self._timed_out(f"took longer than {limit} in {what}")
        found = answer.result()
        if found is None:
            raise self._end_error(what)
        if "value" in found:
            return found["value"]
        raise self._error(found, what)

    def _error(self, found: dict[str, Any], what: str) -> Exception:
        if "config" in found:
            return ConfigError(found["config"], allowed=found["allowed"], todo=found["todo"])
        if found["infrastructure"]:
            return InfrastructureError(f"{what} of the environment {self._name!r}: {found['error']}")
        text = f"the environment {self._name!r} failed in {what}: {found['error']}"
        return EnvironmentFailedError(text, found["stack"])

    async def _timed_out(self, what: str) -> EnvironmentFailedError:
        self._host.end_with_stack(self._key)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STACK_S):
                await self._ended.wait()
        return self._failure(what, timed_out=True)

    def _end_error(self, what: str) -> Exception:
        status = self._status
        if isinstance(status, InfrastructureError):
            return status
        if status == -signal.SIGKILL:
            return InfrastructureError(
                f"the process of the environment {self._name!r} was killed by the system in {what}, which may lack memory"
            )
        if status is None:
            how = "closed its connection"
        elif status < 0:
            how = f"ended its process with signal {-status} ({signal.strsignal(-status)})"
        else:
            how = f"ended its process with exit code {status}"
        return self._failure(f"{how} in {what}", timed_out=False)

    def _failure(self, what: str, *, timed_out: bool) -> EnvironmentFailedError:
        dumped = os.pread(self._stacks, 1 << 20, 0).decode(errors="replace")
        frames = user_frames(dumped_frames(dumped, process.__file__))
        text = f"the environment {self._name!r} {what}{user_line(frames)}"
        return EnvironmentFailedError(text, as_traceback(frames, text), timed_out=timed_out)

    def _report_end(self, status: int | InfrastructureError) -> None:
        """Receive the end of the process; called from the host's thread."""
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._set_end, status)

    def _set_end(self, status: int | InfrastructureError) -> None:
        self._status = status
        self._ended.set()
        self._fail_later()
        self._on_end()

    def _fail_later(self) -> None:
        self._loop.call_later(_LAST_ANSWER_S, self._channel.fail)


class _Channel(asyncio.Protocol):
    """Requests over a socket, and answers in their order. Each answer belongs to its own request, also after the caller of one was cancelled."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._transport: asyncio.Transport | None = None
        self._read = bytearray()
        self._answers: deque[asyncio.Future[dict[str, Any] | None]] = deque()

    async def open(self) -> None:
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=self._socket)

    def request(self, method: str, arguments: tuple[Any, ...]) -> asyncio.Future[dict[str, Any] | None]:
        """Send a request; return its answer; None if there will be none.

        Raises:
            RftError: the arguments cannot be sent to another process.
        """
        self.send(method, arguments)
        answer = asyncio.get_running_loop().create_future()
        self._answers.append(answer)
        return answer

    def send(self, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            pickled = pickle.dumps(arguments)
        except Exception as error:  # any object of the user's
            raise RftError(
                f"the arguments of an environment's {method} cannot be sent to its process: {type(error).__name__}: {error}",
                todo="pass plain values",
            ) from error
        data = method.encode() + b" " + pickled
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(process.LENGTH.pack(len(data)) + data)

    def fail(self) -> None:
        """Give up the answers that are awaited."""
        while self._answers:
            self._resolve(None)

    def _resolve(self, found: dict[str, Any] | None) -> None:
        """Set the oldest answer, unless its caller was cancelled. The answer to `close` of a place that was abandoned has no request."""
        if self._answers and not (answer := self._answers.popleft()).done():
            answer.set_result(found)

    def close(self) -> None:
        if self._transport is None:
            self._socket.close()
        else:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # No isinstance: uvloop, which Ray's processes use, has a class of its own.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._read += data
        size = process.LENGTH.size
        while len(self._read) >= size:
            (length,) = process.LENGTH.unpack_from(self._read)
            if length > _MAX_ANSWER_BYTES:
                self.fail()
                self.close()
                return
            if len(self._read) < size + length:
                return
            answer = json.loads(bytes(self._read[size : size + length]))
            del self._read[: size + length]
            self._resolve(answer)
