"""What a selector is: five methods, called under the run's planning lock by whichever explorer plans.

A selector sees the ids of a taskset's active tasks, ascending, which is loading order. They may change between two plans:
people exclude tasks and load more while a run trains, so what a selector remembers it remembers by id, never by position.
`select` and `state_dict` run in the transaction that stores the groups planned, so a crash neither skips nor repeats a task.
Knowledge about tasks belongs in `task_observation` and `task_stat`; `state_dict` is for what is not a statistic (a cursor,
an epoch).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Observation:
    """One outcome: `successes` of `trials` at a task, active or not; kind as in rft.observation_kind."""

    task_id: int
    successes: float
    trials: float
    kind: str


class Selector(ABC):
    """Chooses tasks of one taskset.

    Args:
        task_ids: its active tasks, ascending; at least one.
        seed: the run's seed.
    """

    def __init__(self, task_ids: Sequence[int], seed: int) -> None:
        self.task_ids = task_ids
        self.seed = seed

    @abstractmethod
    def select(self, count: int) -> list[int]:
        """Ids of the next `count` tasks; the same task may come again."""

    @abstractmethod
    def observe(self, observations: Sequence[Observation]) -> None:
        """Learn from outcomes, each given exactly once."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart, as JSON."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state, which may have been saved over other tasks."""

    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """Numbers worth plotting."""
