"""The length of a response, as a band.

    - {name: length, max: 200}
    - {name: length, min: 50, max: 200, ramp: 100, weight: 0.2}
    - {name: length, target: 120, ramp: 60, unit: characters}

With the distance d of the length from the band (0 within it):

    reward = 1 if d = 0, else max(0, 1 − d / ramp)

Without a ramp it is 1 within the band and 0 outside. The length is that of the scored answer: its tokens with the end token, its characters, or its words.
For a penalty that starts before the limit, see `overlong`; for lengths compared within a group, `shortest_correct`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rftcore.workflows.task import Task, Turn
from rftdata.errors import ConfigError

Unit = Literal["tokens", "characters", "words"]
Count = Annotated[int, Field(ge=0)]


class Length:
    """A reward of 1 within a band of lengths.

    Args:
        min: shortest length of the band.
        max: longest length of the band; none without it.
        target: the only length of the band, in place of min and max.
        ramp: distance from the band over which the reward falls to 0.
        unit: what is counted.

    Raises:
        ConfigError: the band is empty, or named twice.
    """

    runs_in_explorer = True

    def __init__(
        self,
        *,
        min: Count | None = None,
        max: Count | None = None,
        target: Count | None = None,
        ramp: Count = 0,
        unit: Unit = "tokens",
    ) -> None:
        if (target is None) == (min is None and max is None):
            raise ConfigError(
                "the band of lengths is not clear", allowed="either target, or min, max or both", todo="set one of them"
            )
        low, high = (min or 0, max) if target is None else (target, target)
        if high is not None and low > high:
            raise ConfigError("min is above max", value=low, allowed=f"up to {high}")
        self._low, self._high, self._ramp, self._unit = low, high, ramp, unit

    def __call__(self, turn: Turn, task: Task) -> float:
        """Return the reward, 0 … 1."""
        length = length_of(turn, self._unit)
        beyond = 0 if self._high is None else length - self._high
        distance = max(0, self._low - length, beyond)
        if distance == 0:
            return 1.0
        return max(0.0, 1.0 - distance / self._ramp) if self._ramp else 0.0


def length_of(turn: Turn, unit: Unit) -> int:
    """Return the length of a turn's answer."""
    if unit == "tokens":
        return len(turn.response_token_ids)
    return len(turn.response) if unit == "characters" else len(turn.response.split())
