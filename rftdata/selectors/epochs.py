"""Every task once per epoch, whatever is excluded or loaded in the middle of one.

A task's place in an epoch is a number that depends on its id alone, never on the other tasks: taking tasks out or adding some
moves nobody else. An epoch is remembered as the highest id there was when it began and the place of the last task chosen.
Excluded tasks are skipped; tasks loaded since, which have higher ids, come with the next epoch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rftdata.selectors.base import Observation, Selector

Ids = npt.NDArray[np.int64]
Places = npt.NDArray[np.uint64]


class EpochSelector(Selector):
    """Goes through the tasks in the order of their places, epoch after epoch."""

    def __init__(self, task_ids: Sequence[int], seed: int) -> None:
        super().__init__(task_ids, seed)
        self._ids: Ids = np.asarray(task_ids, dtype=np.int64)
        self._epoch = 0
        self._highest = int(self._ids.max())
        self._last: int | None = None
        self._order: Ids | None = None
        self._done = 0

    @abstractmethod
    def places(self, task_ids: Ids, epoch: int) -> Places:
        """A different number for every id: where the task stands in the epoch."""

    def select(self, count: int) -> list[int]:
        chosen: list[int] = []
        while len(chosen) < count:
            order = self._ordered()
            taken = order[self._done : self._done + count - len(chosen)]
            chosen += taken.tolist()
            self._done += len(taken)
            if len(taken):
                self._last = int(self.places(taken[-1:], self._epoch)[0])
            else:
                self._epoch, self._highest, self._last, self._order = self._epoch + 1, int(self._ids.max()), None, None
        return chosen

    def observe(self, observations: Sequence[Observation]) -> None:
        """Outcomes do not change the order."""

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "highest": self._highest, "last": self._last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._epoch, self._highest, self._last = state["epoch"], state["highest"], state["last"]
        self._order = None

    def metrics(self) -> dict[str, float]:
        return {"epoch": self._epoch + self._done / max(len(self._ordered()), 1)}

    def _ordered(self) -> Ids:
        """The epoch's tasks in order; the first `_done` of them lie at or before the last one chosen."""
        if self._order is None:
            ids = self._ids[self._ids <= self._highest]
            places = self.places(ids, self._epoch)
            self._order = ids[np.argsort(places)]
            self._done = 0 if self._last is None else int((places <= np.uint64(self._last)).sum())
        return self._order
