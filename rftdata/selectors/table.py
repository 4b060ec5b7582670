"""The tasks of a selector as arrays: the positions of ids, the open tasks, and drawing among them.

`DrawnSelector` is the base of selectors that draw at random.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rftdata.selectors.base import Ids, Selector, TaskIds

Flags = npt.NDArray[np.bool_]


class TaskTable:
    """Active tasks in the order of their ids.

    Attributes:
        ids: [N], ascending.
        open: [N], False where a task is retired.
        num_open: number of open tasks.
    """

    def __init__(self, task_ids: TaskIds) -> None:
        self.ids: Ids = np.asarray(task_ids, dtype=np.int64)
        self.open: Flags = np.ones(len(self.ids), dtype=np.bool_)
        self.num_open = len(self.ids)

    def __len__(self) -> int:
        return len(self.ids)

    def positions(self, task_ids: Iterable[int]) -> Ids:
        """Return the position of each id; -1 for tasks that are not active."""
        wanted: Ids = np.fromiter(task_ids, dtype=np.int64)
        places = np.minimum(np.searchsorted(self.ids, wanted), len(self.ids) - 1)
        return np.where(self.ids[places] == wanted, places, -1)

    def retire(self, task_ids: Sequence[int]) -> None:
        """Close these tasks."""
        places = self.positions(task_ids)
        places = np.unique(places[places >= 0])
        self.num_open -= int(self.open[places].sum())
        self.open[places] = False


def draw_distinct(rng: np.random.Generator, wanted: Flags, count: int) -> Ids:
    """Draw `count` different positions uniformly among the wanted ones; there must be at least `count` of them.

    The draw depends on the flags only, not on their history, so a rebuilt selector draws the same.
    """
    chosen: Ids = rng.choice(np.flatnonzero(wanted), count, replace=False)
    return chosen


class DrawnSelector(Selector):
    """Draws its tasks at random.

    Every choice has its own random numbers, from the run's seed and the number of earlier choices, so a restart continues with the same.
    """

    def __init__(self, task_ids: TaskIds, seed: int) -> None:
        super().__init__(task_ids, seed)
        self.table = TaskTable(task_ids)
        self._draws = 0

    @abstractmethod
    def _choose(self, rng: np.random.Generator, size: int) -> Ids:
        """Return positions of `size` different open tasks."""

    def select(self, count: int) -> list[int]:
        rng = np.random.default_rng((self.seed, self._draws))
        self._draws += 1
        whole_rounds, rest = divmod(count, self.table.num_open)
        sizes = [self.table.num_open] * whole_rounds + [rest] * (rest > 0)
        chosen_ids: list[int] = []
        for size in sizes:
            chosen_ids += self.table.ids[self._choose(rng, size)].tolist()
        return chosen_ids

    def state_dict(self) -> dict[str, Any]:
        return {"draws": self._draws}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._draws = state["draws"]

    def retire(self, task_ids: Sequence[int]) -> bool:
        self.table.retire(task_ids)
        return True
