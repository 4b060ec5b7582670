"""Async environments, which run in the event loop of the workflows."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from rftcore.environments.base import Environment, Observation, Step
from rftcore.environments.errors import EnvironmentFailedError, InfrastructureError
from rftcore.environments.handle import EnvironmentLimits, Facts
from rftcore.environments.registry import EnvironmentClass
from rftcore.environments.results import Results, tool_schemas
from rftcore.failures import comes_from_outside, describe, holds, user_stack, waited_at
from rftdata.errors import ConfigError, RftError

T = TypeVar("T")

logger = logging.getLogger(__name__)

_closing: set[asyncio.Task[None]] = set()  # the event loop holds its tasks only weakly


class LoopPlace:
    """An environment in this event loop. `asyncio.timeout` limits its calls."""

    def __init__(self, name: str, environment_class: EnvironmentClass, limits: EnvironmentLimits) -> None:
        self._name, self._class, self._limits = name, environment_class, limits
        self._environment: Environment | None = None
        self._results = Results(environment_class.roles)

    async def make(self, args: Mapping[str, Any]) -> Facts:
        async def made() -> Environment:
            return self._class(**args)

        self._environment = environment = await self._limited("make", made(), "its constructor")
        self._results = Results(environment.roles)
        return Facts(tuple(environment.roles), bool(environment.deterministic))

    async def reset(self, task: Any, seed: int) -> tuple[Observation, Sequence[Any]]:
        assert self._environment is not None
        value = await self._limited("reset", self._environment.reset(task, seed), "reset")
        return self._checked(self._results.observation, value, "reset"), tool_schemas(self._environment.tools)

    async def step(self, action: Any, role: str, number: int) -> Step:
        assert self._environment is not None
        value = await self._limited("step", self._environment.step(action, role), f"step {number}")
        return self._checked(self._results.step, value, f"step {number}")

    async def close(self) -> None:
        environment, self._environment = self._environment, None
        if environment is None:
            return
        try:
            closed = environment.close()
            if inspect.isawaitable(closed):
                await self._limited("close", closed, "close")
        except Exception as error:  # noqa: BLE001 - the rollout is over, and keeps its reward
            logger.warning("the environment %r failed in close: %s", self._name, describe(error))

    def abandon(self) -> None:
        if self._environment is not None:
            task = asyncio.get_running_loop().create_task(self.close())
            _closing.add(task)
            task.add_done_callback(_closing.discard)

    async def _limited(self, method: str, call: Any, what: str) -> Any:
        seconds, limit = self._limits.of(method)
        timeout = asyncio.timeout(seconds)
        try:
            async with timeout:
                return await call
        except (ConfigError, InfrastructureError):
            raise
        except BaseException as error:
            if comes_from_outside(error):
                raise
            if timeout.expired():
                text = f"the environment {self._name!r} took longer than {limit} in {what}{waited_at(error)}"
                raise EnvironmentFailedError(text, user_stack(error), timed_out=True) from error
            text = str(error) if isinstance(error, RftError) else describe(error)
            if holds(error, InfrastructureError, ConnectionError, MemoryError):
                raise InfrastructureError(f"{what} of the environment {self._name!r}: {text}") from error
            stack = text if isinstance(error, RftError) else user_stack(error)
            raise self._failed(what, text, stack) from error

    def _checked(self, check: Callable[[object], T], value: object, what: str) -> T:
        try:
            return check(value)
        except RftError as error:
            raise self._failed(what, str(error), str(error)) from error

    def _failed(self, what: str, text: str, stack: str) -> EnvironmentFailedError:
        return EnvironmentFailedError(f"the environment {self._name!r} failed in {what}: {text}", stack)
