"""`EnvironmentHandle`: an open environment as workflows use it, wherever it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from rftcore.environments.base import Observation, Step
from rftcore.rollout_clock import clock_suspended
from rftdata.errors import RftError


@dataclass(frozen=True)
class EnvironmentLimits:
    """Time limits of one environment, in seconds. Each call has its own; the limit of the rollout stands still meanwhile.

    Attributes:
        step_timeout_s: of one step.
        reset_timeout_s: of the constructor, and of `reset`.
        close_s: of `close`; afterwards its process is ended.
    """

    step_timeout_s: float = 30.0
    reset_timeout_s: float = 120.0
    close_s: float = 10.0

    def of(self, method: str) -> tuple[float, str]:
        """Return the limit of a method, and its name in messages."""
        if method == "step":
            return self.step_timeout_s, f"step_timeout_s = {self.step_timeout_s:g} s"
        if method == "close":
            return self.close_s, f"{self.close_s:g} s"
        return self.reset_timeout_s, f"reset_timeout_s = {self.reset_timeout_s:g} s"


@dataclass(frozen=True)
class Facts:
    """What is known of an environment once it is made."""

    roles: tuple[str, ...]
    deterministic: bool


class Place(Protocol):
    """Where an environment runs. Its results are checked.

    Each method raises EnvironmentFailedError for an error of the environment and InfrastructureError for one from outside.
    """

    async def make(self, args: Mapping[str, Any]) -> Facts:
        """Call the constructor."""

    async def reset(self, task: Any, seed: int) -> tuple[Observation, Sequence[Any]]:
        """Return the first observation, and the schemas of the tools."""

    async def step(self, action: Any, role: str, number: int) -> Step:
        """Act.

        Args:
            number: of the step in its episode, from 1, for messages.
        """

    async def close(self) -> None:
        """Call `close`, and end what runs the environment. Errors are logged."""

    def abandon(self) -> None:
        """Let `close` be called, and end what runs the environment, without waiting for it."""


class EnvironmentHandle:
    """An open environment. One rollout uses it, with one call at a time.

    Attributes:
        name: of the environment in the configuration.
        roles, deterministic: see `Environment`.
        tools: schemas of the tools; known after `reset`.
    """

    def __init__(self, name: str, place: Place, facts: Facts) -> None:
        self.name, self._place = name, place
        self.roles, self.deterministic = facts.roles, facts.deterministic
        self.tools: Sequence[Any] = ()
        self._num_steps = 0
        self._has_begun = self._has_ended = self._is_busy = False

    async def reset(self, task: Any, seed: int) -> Observation:
        """Begin the episode; return the first observation.

        Raises:
            EnvironmentFailedError: the environment raised, took too long, ended its process or returned something invalid.
            InfrastructureError: something outside the environment failed.
        """
        if self._has_begun:
            raise RftError(
                f"reset of the environment {self.name!r} was called again",
                todo="open another environment for each episode",
            )
        self._has_begun = True
        with self._alone("reset"):
            seen, self.tools = await self._place.reset(task, seed)
        return seen

    async def step(self, action: Any, role: str = "agent") -> Step:
        """Act; return what follows. Errors are those of `reset`.

        Args:
            action: text, or the call of a tool.
            role: the role that acts.
        """
        if not self._has_begun or self._has_ended:
            when = "after the end of the episode" if self._has_ended else "before reset"
            raise RftError(f"step of the environment {self.name!r} was called {when}", todo="correct the workflow")
        if role not in self.roles:
            raise RftError(
                f"step of the environment {self.name!r} was called for a role that it does not have",
                value=role,
                allowed=", ".join(self.roles),
            )
        self._num_steps += 1
        with self._alone("step"):
            step = await self._place.step(action, role, self._num_steps)
        self._has_ended = step.ended
        return step

    async def close(self) -> None:
        """Close the environment before its context ends; a second call does nothing."""
        with self._alone("close"):
            await self._place.close()

    @contextmanager
    def _alone(self, method: str) -> Iterator[None]:
        if self._is_busy:
            raise RftError(
                f"{method} of the environment {self.name!r} was called while another call is running",
                todo="await each call before the next, or open an environment for each branch",
            )
        self._is_busy = True
        try:
            with clock_suspended():  # the call has its own limit
                yield
        finally:
            self._is_busy = False
