"""Tasks in loading order, again and again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rftdata.selectors.base import Observation, Selector


class Sequential(Selector):
    """Position i mod num_tasks at the i-th selection."""

    def __init__(self, num_tasks: int, seed: int) -> None:
        super().__init__(num_tasks, seed)
        self._next = 0

    def select(self, count: int) -> list[int]:
        first = self._next
        self._next += count
        return [i % self.num_tasks for i in range(first, self._next)]

    def observe(self, observations: Sequence[Observation]) -> None:
        """Outcomes do not change the order."""

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = int(state["next"])

    def metrics(self) -> dict[str, float]:
        return {"epoch": self._next / self.num_tasks}
