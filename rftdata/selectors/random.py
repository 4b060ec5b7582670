"""Tasks at random, the same again soon or never: each choice is drawn from all tasks, without repetition within it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rftdata.selectors.base import DeafSelector, TaskIds
from rftdata.selectors.table import TaskTable, draw_distinct, in_rounds


class Random(DeafSelector):
    """Uniform; remembers only how often it drew."""

    def __init__(self, task_ids: TaskIds, seed: int) -> None:
        super().__init__(task_ids, seed)
        self.table = TaskTable(task_ids)
        self._draws = 0

    def select(self, count: int) -> list[int]:
        rng = np.random.default_rng((self.seed, self._draws))
        self._draws += 1
        chosen = [draw_distinct(rng, self.table.open, size) for size in in_rounds(count, self.table.num_open)]
        return self.table.ids[np.concatenate(chosen)].tolist() if chosen else []

    def state_dict(self) -> dict[str, Any]:
        return {"draws": self._draws}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._draws = state["draws"]

    def metrics(self) -> dict[str, float]:
        return {"draws": float(self._draws)}

    def retire(self, task_ids: Sequence[int]) -> bool:
        self.table.retire(task_ids)
        return True
