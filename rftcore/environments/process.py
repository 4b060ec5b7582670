"""The process of one environment: it answers the calls of one rollout, one after the other, in its main thread.

Requests are pickled by the explorer. Answers are JSON, because text that the policy wrote has been processed here, and reading an answer must not run code.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import inspect
import json
import os
import pickle
import random
import signal
import socket
import struct
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

from rftcore.environments.base import Environment
from rftcore.environments.results import Json, Results, observation_to_json, step_to_json, tool_schemas
from rftcore.failures import InfrastructureError, describe, holds, user_stack
from rftdata.errors import ConfigError, RftError

LENGTH = struct.Struct("!I")
STACK_SIGNAL = int(signal.SIGRTMAX) - 3
"""Writes the stacks and ends the process; programs do not use it otherwise."""
_MAX_TEXT = 20_000
_PR_SET_CHILD_SUBREAPER = 36


def serve(connection: socket.socket, stacks: int, environment_class: type[Environment]) -> NoReturn:
    """Answer requests until the other end is closed or the environment is, then exit.

    Args:
        connection: to the explorer.
        stacks: file for the stacks of a call that is ended.
    """
    faulthandler.enable(stacks)
    faulthandler.register(STACK_SIGNAL, stacks, all_threads=True, chain=True)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    process = os.getpid()
    calls = _Calls(environment_class)
    while (request := _receive(connection)) is not None:
        method, arguments = request
        data = calls.answer(method, arguments)
        if os.getpid() != process:  # a process that the environment has forked, and that has left it
            os._exit(1)
        connection.sendall(LENGTH.pack(len(data)) + data)
        if method == "close":
            break
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def become_subreaper() -> None:
    """Let processes whose parent ends become children of this one, so that none escapes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _receive(connection: socket.socket) -> tuple[str, bytes] | None:
    header = _exactly(connection, LENGTH.size)
    data = None if header is None else _exactly(connection, *LENGTH.unpack(header))
    if data is None:
        return None
    method, _, arguments = data.partition(b" ")
    return method.decode(), arguments


def _exactly(connection: socket.socket, length: int) -> bytes | None:
    """Return so many bytes; None at the end of the connection."""
    data = b""
    while len(data) < length:
        try:
            part = connection.recv(length - len(data))
        except ConnectionError:
            return None
        if not part:
            return None
        data += part
    return data


class _Calls:
    """The environment and its methods."""

    def __init__(self, environment_class: type[Environment]) -> None:
        self._class = environment_class
        self._results = Results(environment_class.roles)
        self._environment: Environment | None = None
        self._loop: asyncio.Runner | None = None

    def answer(self, method: str, arguments: bytes) -> bytes:
        """Call a method; return its result or its error as JSON."""
        try:
            value = getattr(self, f"_{method}")(*pickle.loads(arguments))
            return json.dumps({"value": value}).encode()
        except BaseException as error:  # noqa: BLE001 - the boundary: errors of a user's code are data
            return json.dumps(_as_json(error)).encode()

    def _make(self, args: Mapping[str, Any]) -> Json:
        self._environment = environment = self._class(**args)
        self._results = Results(environment.roles)
        return [list(environment.roles), bool(environment.deterministic)]

    def _reset(self, task: Any, seed: int) -> Json:
        environment = self._made()
        _seed_all(seed)
        seen = self._results.observation(self._awaited(environment.reset(task, seed)))
        return [observation_to_json(seen), tool_schemas(environment.tools)]

    def _step(self, action: Any, role: str) -> Json:
        return step_to_json(self._results.step(self._awaited(self._made().step(action, role))))

    def _close(self) -> Json:
        if self._environment is not None:
            self._awaited(self._environment.close())
        if self._loop is not None:
            self._loop.close()

    def _made(self) -> Environment:
        assert self._environment is not None
        return self._environment

    def _awaited(self, value: Any) -> Any:
        if not inspect.isawaitable(value):
            return value
        if self._loop is None:
            self._loop = asyncio.Runner()
        return self._loop.run(_await(value))


async def _await(value: Any) -> Any:
    return await value


def _seed_all(seed: int) -> None:
    """Seed the global generators, which every fork of one process would otherwise begin alike, or by chance."""
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


def _as_json(error: BaseException) -> Json:
    if isinstance(error, ConfigError):
        what = error.what if error.value is None else f"{error.what} (got {error.value!r})"
        return {"config": what[:_MAX_TEXT], "allowed": error.allowed, "todo": error.todo}
    outside = holds(error, InfrastructureError, ConnectionError, MemoryError)
    text = str(error) if isinstance(error, RftError) else describe(error)
    stack = text if isinstance(error, RftError) else user_stack(error)
    return {"error": text[:_MAX_TEXT], "stack": stack[-_MAX_TEXT:], "infrastructure": outside}
