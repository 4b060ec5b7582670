"""The tasks of a selector as arrays: where an id stands, which are still open, and drawing among them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from rftdata.selectors.base import Ids, TaskIds

Flags = npt.NDArray[np.bool_]


class TaskTable:
    """Active tasks in the order of their ids.

    Attributes:
        ids: [N], ascending.
        open: [N], False where a task is retired.
        num_open: how many are open.
    """

    def __init__(self, task_ids: TaskIds) -> None:
        self.ids: Ids = np.asarray(task_ids, dtype=np.int64)
        self.open: Flags = np.ones(len(self.ids), dtype=np.bool_)
        self.num_open = len(self.ids)

    def __len__(self) -> int:
        return len(self.ids)

    def positions(self, task_ids: Iterable[int]) -> Ids:
        """Place of each id; -1 for tasks that are not active."""
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
    """`count` different positions at random, all equally likely, among the wanted ones, which are at least so many.

    What is drawn depends on the flags only, not on how they came about: a selector that is made anew draws the same.
    """
    chosen: Ids = rng.choice(np.flatnonzero(wanted), count, replace=False)
    return chosen


def in_rounds(count: int, num_open: int) -> list[int]:
    """Sizes of the draws without repetition that `count` takes: whole rounds of all tasks, and what remains."""
    return [num_open] * (count // num_open) + ([count % num_open] if count % num_open else [])
