"""Environments of an OpenEnv server, over its WebSocket protocol (`/ws`): each connection is a session with an environment of its own.

The client sends `{"type": "reset" | "step" | "state" | "close", "data": …}` and receives `{"type": "observation" | "state" | "error", "data": …}`.
OpenEnv's own package is not needed. It runs in the event loop, since it only waits.

A lost connection and a server without a free session are failures of the infrastructure: the rollout is tried again. An action that the server
refuses as invalid is an observation. Any other error of the server is the environment's.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException

from rftcore.environments.base import Environment, Observation, Step
from rftcore.failures import InfrastructureError
from rftdata.errors import ConfigError

_MAX_MESSAGE_BYTES = 32 << 20
_OF_THE_SERVER = ("CAPACITY_REACHED", "FACTORY_ERROR", "SESSION_ERROR")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")  # a proxy would connect to its own machine
_INVALID_ACTION = "VALIDATION_ERROR"


class OpenEnv(Environment):
    """A session.

    Args:
        url: of the server, such as `http://host:8000`.
        action_field: field of the server's action that gets the answer as text; None: the answer is the action as a JSON object.
        action: further fields of each action.
        observation_field: field of an observation that the policy reads; None: its only text if it has just one, else all of it as JSON.
        reset: further arguments of the server's reset, beside the seed.
        with_state: whether to ask for the state after each step, for algorithms that compare states.
        connect_timeout_s: limit for connecting, in seconds.
    """

    def __init__(
        self,
        url: str,
        action_field: str | None = "message",
        action: Mapping[str, Any] | None = None,
        observation_field: str | None = None,
        reset: Mapping[str, Any] | None = None,
        with_state: bool = False,
        connect_timeout_s: float = 10.0,
    ) -> None:
        scheme, separator, rest = url.rstrip("/").partition("://")
        schemes = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
        if not separator or scheme not in schemes:
            raise ConfigError(
                "environment_args: url of openenv", value=url, allowed="http://HOST:PORT, https://…, ws://… or wss://…"
            )
        self.url = f"{schemes[scheme]}://{rest}/ws"
        self.action_field, self.action, self.observation_field = action_field, dict(action or {}), observation_field
        self.reset_arguments, self.with_state, self.connect_timeout_s = dict(reset or {}), with_state, connect_timeout_s
        self._connection: ClientConnection | None = None

    async def reset(self, task: Any, seed: int) -> Observation:
        try:
            self._connection = await connect(
                self.url,
                open_timeout=self.connect_timeout_s,
                max_size=_MAX_MESSAGE_BYTES,
                ping_interval=None,
                proxy=None if urlsplit(self.url).hostname in _LOOPBACK else True,
            )
        except (OSError, TimeoutError, WebSocketException) as error:
            raise InfrastructureError(f"no connection to the OpenEnv server {self.url}: {error}") from error
        data = self._result(await self._ask("reset", {"seed": seed, **self.reset_arguments}))
        return Observation(self._text(data), state=await self._state())

    async def step(self, action: Any, role: str = "agent") -> Step:
        sent = self._sent_action(str(action))
        if isinstance(sent, str):
            return Step(Observation(sent, state=await self._state()))
        answer = await self._ask("step", sent)
        if answer["type"] == "error" and answer["data"].get("code") == _INVALID_ACTION:
            return Step(Observation(f"Invalid action: {_validation(answer['data'])}", state=await self._state()))
        data = self._result(answer)
        done = bool(data.get("done"))
        seen = Observation(self._text(data), state=await self._state())
        return Step(seen, float(data.get("reward") or 0.0), terminated=done)

    async def close(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(WebSocketException, OSError):  # the server has ended the session
                await self._connection.send(json.dumps({"type": "close"}))
            await self._connection.close()

    def _sent_action(self, answer: str) -> dict[str, Any] | str:
        """Return the server's action for an answer; a text if it is none."""
        if self.action_field is not None:
            return {self.action_field: answer, **self.action}
        try:
            found = json.loads(answer)
        except ValueError as error:
            return f"Invalid action: not JSON: {error}"
        return {**found, **self.action} if isinstance(found, dict) else "Invalid action: not a JSON object"

    async def _ask(self, kind: str, data: dict[str, Any] | None = None) -> dict[str, Any]:
        assert self._connection is not None
        try:
            await self._connection.send(json.dumps({"type": kind} if data is None else {"type": kind, "data": data}))
            answer = json.loads(await self._connection.recv())
        except (OSError, WebSocketException) as error:
            raise InfrastructureError(f"the connection to the OpenEnv server {self.url} is lost: {error}") from error
        if not isinstance(answer, dict) or not isinstance(answer.get("data"), dict):
            raise ValueError(
                f"the OpenEnv server {self.url} answered {kind} with something else than a message: {str(answer)[:200]}"
            )
        return answer

    def _result(self, answer: dict[str, Any]) -> dict[str, Any]:
        data: dict[str, Any] = answer["data"]
        if answer.get("type") != "error":
            return data
        text = f"the OpenEnv server {self.url} reports {data.get('code', 'an error')}: {data.get('message', '')}"
        if data.get("code") in _OF_THE_SERVER:
            raise InfrastructureError(text)
        raise RuntimeError(text)

    async def _state(self) -> str | None:
        if not self.with_state:
            return None
        state = dict(self._result(await self._ask("state")))
        state.pop("episode_id", None)  # another one for each episode
        return json.dumps(state, sort_keys=True)

    def _text(self, data: dict[str, Any]) -> str:
        seen = data.get("observation", {})
        if isinstance(seen, str):
            return seen
        if self.observation_field is not None:
            if self.observation_field not in seen:
                raise ConfigError(
                    f"environment_args: observations of the OpenEnv server {self.url} have no field {self.observation_field!r}",
                    allowed=", ".join(seen),
                )
            value = seen[self.observation_field]
            return value if isinstance(value, str) else json.dumps(value)
        texts = [value for value in seen.values() if isinstance(value, str)]
        return texts[0] if len(texts) == 1 else json.dumps(seen)


def _validation(data: dict[str, Any]) -> str:
    errors = data.get("errors") or []
    texts = [
        f"{'.'.join(map(str, one.get('loc', ())))}: {one.get('msg', '')}" for one in errors if isinstance(one, dict)
    ]
    return "; ".join(texts) or str(data.get("message", ""))
