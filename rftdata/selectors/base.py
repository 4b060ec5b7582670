"""What a selector is: five methods, called under the run's planning lock by whichever explorer plans.

A selector sees a taskset as positions 0 … num_tasks - 1 in loading order. `select` and `state_dict` run in the transaction
that stores the groups planned, so a crash neither skips nor repeats a task. Knowledge about tasks belongs in
`task_observation` and `task_stat`; `state_dict` is for what is not a statistic (a cursor, an epoch).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Observation:
    """One outcome: `successes` of `trials` at the task in `position`; kind as in rft.observation_kind."""

    position: int
    successes: float
    trials: float
    kind: str


class Selector(ABC):
    """Chooses tasks of one taskset.

    Args:
        num_tasks: tasks there are.
        seed: the run's seed.
    """

    def __init__(self, num_tasks: int, seed: int) -> None:
        self.num_tasks = num_tasks
        self.seed = seed

    @abstractmethod
    def select(self, count: int) -> list[int]:
        """Positions of the next `count` tasks; the same task may come again."""

    @abstractmethod
    def observe(self, observations: Sequence[Observation]) -> None:
        """Learn from outcomes, each given exactly once."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart, as JSON."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""

    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """Numbers worth plotting."""
