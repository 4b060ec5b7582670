"""Every task once per epoch, even if tasks are excluded or loaded during the epoch.

A task's place in an epoch depends on the task alone, so removing or adding tasks does not move the others. The state of an epoch is
the highest id when it began and the place of the last chosen task. Excluded tasks are skipped; tasks loaded later, which have higher
ids, join in the next epoch. If one choice extends into the next epoch, tasks that it already contains are put off, and chosen first
in the next choice.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rftdata.selectors.base import Ids, NonAdaptiveSelector, TaskIds
from rftdata.selectors.table import Flags, TaskTable

Places = Sequence[npt.NDArray[Any]]


class EpochSelector(NonAdaptiveSelector):
    """Chooses the tasks in the order of their places, epoch after epoch."""

    def __init__(self, task_ids: TaskIds, seed: int) -> None:
        super().__init__(task_ids, seed)
        self.table = TaskTable(task_ids)
        self._epoch = 0
        self._highest = int(self.table.ids.max())
        self._last: list[Any] | None = None
        self._put_off: list[int] = []
        self._order: Ids | None = None
        self._done = 0

    @abstractmethod
    def places(self, positions: Ids, epoch: int) -> Places:
        """Return the places in an epoch of the tasks at these positions: columns, the most significant first; no two rows are equal."""

    def wanted(self, positions: Ids, epoch: int) -> Flags:
        """Return which of these tasks to choose when it is their turn; the others are skipped."""
        return self.table.open[positions]

    def select(self, count: int) -> list[int]:
        distinct = count <= self.table.num_open
        chosen = self._take_put_off(count) if distinct else []
        while len(chosen) < count:
            order = self._ordered()
            # A few more than are missing, since some may be skipped.
            ahead = order[self._done : self._done + 2 * (count - len(chosen)) + 8]
            if not len(ahead):
                self._epoch, self._highest, self._last, self._order = (
                    self._epoch + 1,
                    int(self.table.ids.max()),
                    None,
                    None,
                )
                continue
            turns = np.flatnonzero(self.wanted(ahead, self._epoch))[: count - len(chosen)]
            passed = len(ahead) if len(turns) < count - len(chosen) else int(turns[-1]) + 1
            ids = self.table.ids[ahead[turns]].tolist()
            if distinct:
                had = set(chosen)
                self._put_off += [task_id for task_id in ids if task_id in had]
                ids = [task_id for task_id in ids if task_id not in had]
            chosen += ids
            self._done += passed
            self._last = [column[0].item() for column in self.places(ahead[passed - 1 : passed], self._epoch)]
        return chosen

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "highest": self._highest, "last": self._last, "put_off": list(self._put_off)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        last = state["last"]
        if (state["epoch"], state["highest"]) != (self._epoch, self._highest):
            self._order = None
        self._epoch, self._highest = state["epoch"], state["highest"]
        self._last = [last] if isinstance(last, int) else last
        self._put_off = list(state.get("put_off", ()))
        if self._order is not None:
            self._done = self._num_done(self._order)

    def metrics(self) -> dict[str, float]:
        return {"epoch": self._epoch + self._done / max(len(self._ordered()), 1)}

    def retire(self, task_ids: Sequence[int]) -> bool:
        self.table.retire(task_ids)
        return True

    def _take_put_off(self, count: int) -> list[int]:
        """Return up to `count` different tasks of those put off; tasks that no longer exist are forgotten."""
        places = self.table.positions(self._put_off)
        places = places[places >= 0]
        still = self.table.ids[places[self.table.open[places]]].tolist()
        taken = list(dict.fromkeys(still))[:count]
        for task_id in taken:
            still.remove(task_id)
        self._put_off = still
        return taken

    def _ordered(self) -> Ids:
        """Return the positions of the epoch's tasks in order; the first `_done` of them are at or before the last one chosen."""
        if self._order is None:
            positions = np.flatnonzero(self.table.ids <= self._highest)
            columns = self.places(positions, self._epoch)
            by_place = np.argsort(columns[0]) if len(columns) == 1 else np.lexsort(tuple(reversed(columns)))
            self._order = positions[by_place]
            self._done = self._num_done(self._order)
        return self._order

    def _num_done(self, order: Ids) -> int:
        if self._last is None or not len(order):
            return 0
        before, equal = np.zeros(len(order), dtype=np.bool_), np.ones(len(order), dtype=np.bool_)
        for column, last in zip(self.places(order, self._epoch), self._last, strict=True):
            value = column.dtype.type(last)
            before |= equal & (column < value)
            equal &= column == value
        return int((before | equal).sum())
