"""Checks of what environments return, and their form between processes: JSON values, so that reading them runs no code."""

from __future__ import annotations

import json
import math
import numbers
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeGuard

from rftcore.environments.base import Observation, Step
from rftdata.errors import RftError
from rftdata.limits import replaced

MAX_OBSERVATION_CHARS = 1_000_000
MAX_INFO_BYTES = 1_000_000

Json = Any


class Results:
    """Checks the results of one environment.

    Args:
        roles: of the environment.
    """

    def __init__(self, roles: Sequence[str]) -> None:
        self._roles = tuple(roles)

    def observation(self, value: object) -> Observation:
        """Return what `reset` returned.

        Raises:
            RftError: it is not an Observation with a text and a known role.
        """
        if not isinstance(value, Observation):
            self._refuse("reset", f"returned {_what(value)}", "an Observation", "return Observation(text)")
        return self._checked(value, "reset", value.role, value.state)

    def step(self, value: object) -> Step:
        """Return what `step` returned; role and state of the step and of its observation are then the same.

        Raises:
            RftError: it is not a Step with finite rewards, a text and known roles.
        """
        if not isinstance(value, Step):
            self._refuse("step", f"returned {_what(value)}", "a Step", "return Step(Observation(text), reward)")
        seen = value.observation
        if not isinstance(seen, Observation):
            self._refuse(
                "step", f"returned a Step with {_what(seen)}", "an Observation in it", "write Step(Observation(text))"
            )
        role = seen.role if value.next_role is None else value.next_role
        seen = self._checked(seen, "step", role, seen.state if value.state is None else value.state)
        return Step(
            seen,
            self._reward("reward", value.reward),
            self._truth("terminated", value.terminated),
            self._truth("truncated", value.truncated),
            self._info(value.info),
            seen.role,
            seen.state,
            self._rewards(value.rewards),
        )

    def _checked(self, seen: Observation, method: str, role: object, state: object) -> Observation:
        if not isinstance(seen.text, str):
            self._refuse(
                method, f"returned an Observation whose text is {_what(seen.text)}", "a str", "write it as text"
            )
        if len(seen.text) > MAX_OBSERVATION_CHARS:
            allowed = f"{MAX_OBSERVATION_CHARS:,} characters at most"
            self._refuse(method, f"returned an observation of {len(seen.text):,} characters", allowed, "shorten it")
        if role not in self._roles:
            allowed = f"its roles: {', '.join(self._roles)}"
            self._refuse(method, f"named {reprlib.repr(role)} as the role that acts next", allowed, "correct it")
        if state is not None and not isinstance(state, str):
            self._refuse(method, f"returned {_what(state)} as the state", "a str or None", "write it as text")
        return Observation(replaced(seen.text), str(role), state)

    def _reward(self, what: str, value: object) -> float:
        if _is_number(value) and math.isfinite(value):
            return float(value)
        text = f"{value}, which is not finite," if isinstance(value, float) else _what(value)
        return self._refuse("step", f"returned {text} as the {what}", "a finite number", "return 0.0 for no reward")

    def _rewards(self, value: object) -> dict[str, float]:
        if not isinstance(value, Mapping):
            self._refuse("step", f"returned {_what(value)} as rewards", "a mapping of roles to numbers", "correct it")
        unknown = [role for role in value if role not in self._roles]
        if unknown:
            allowed = f"its roles: {', '.join(self._roles)}"
            self._refuse("step", f"returned a reward of the role {reprlib.repr(unknown[0])}", allowed, "correct it")
        return {str(role): self._reward(f"reward of {role}", reward) for role, reward in value.items()}

    def _truth(self, what: str, value: object) -> bool:
        # NumPy's truth values are of another type.
        if isinstance(value, bool) or type(value).__name__ in ("bool", "bool_"):
            return bool(value)
        return self._refuse("step", f"returned {_what(value)} as {what}", "True or False", "correct it")

    def _info(self, value: object) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            self._refuse("step", f"returned {_what(value)} as info", "a mapping of JSON values", "correct it")
        try:
            text = json.dumps(dict(value))
            found = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            self._refuse("step", f"returned an info that is not JSON: {error}", "JSON values", "convert or remove it")
        if len(text) > MAX_INFO_BYTES:
            allowed = f"{MAX_INFO_BYTES:,} bytes at most"
            self._refuse("step", f"returned an info of {len(text):,} bytes", allowed, "shorten it")
        assert isinstance(found, dict)
        return found

    def _refuse(self, method: str, what: str, allowed: str, todo: str) -> NoReturn:
        raise RftError(f"{method} {what}", allowed=allowed, todo=todo)


def tool_schemas(tools: Sequence[Any]) -> list[Any]:
    """Return the JSON schemas of an environment's tools, which are schemas or have one."""
    return [tool if isinstance(tool, Mapping) else tool.schema for tool in tools]


def observation_to_json(seen: Observation) -> Json:
    """Return the form of a checked observation between processes."""
    return [seen.text, seen.role, seen.state]


def observation_from_json(value: Json) -> Observation:
    """Return the observation of that form."""
    text, role, state = value
    return Observation(text, role, state)


def step_to_json(step: Step) -> Json:
    """Return the form of a checked step between processes."""
    seen = observation_to_json(step.observation)
    return [seen, step.reward, step.terminated, step.truncated, dict(step.info), dict(step.rewards)]


def step_from_json(value: Json) -> Step:
    """Return the step of that form."""
    seen, reward, terminated, truncated, info, rewards = value
    observation = observation_from_json(seen)
    return Step(observation, reward, terminated, truncated, info, observation.role, observation.state, rewards)


def _is_number(value: object) -> TypeGuard[numbers.Real]:
    return not isinstance(value, bool) and isinstance(value, numbers.Real)


def _what(value: object) -> str:
    if value is None:
        return "nothing (None)"
    try:
        text = reprlib.repr(value)
    except Exception:  # noqa: BLE001 - the user's own class
        text = "an object without a text form"
    return f"{text} of type {type(value).__name__}"
