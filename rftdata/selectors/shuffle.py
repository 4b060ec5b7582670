"""Every task once per epoch, in an order drawn anew for each epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rftdata.selectors.base import Observation, Selector


class Shuffle(Selector):
    """The permutation of epoch e comes from numpy's generator seeded with (seed, e): state is the cursor alone."""

    def __init__(self, num_tasks: int, seed: int) -> None:
        super().__init__(num_tasks, seed)
        self._next = 0
        self._epoch = -1
        self._order: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)

    def select(self, count: int) -> list[int]:
        chosen = []
        for i in range(self._next, self._next + count):
            epoch, place = divmod(i, self.num_tasks)
            if epoch != self._epoch:
                self._epoch, self._order = epoch, np.random.default_rng((self.seed, epoch)).permutation(self.num_tasks)
            chosen.append(int(self._order[place]))
        self._next += count
        return chosen

    def observe(self, observations: Sequence[Observation]) -> None:
        """Outcomes do not change the order."""

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = int(state["next"])
        self._epoch = -1

    def metrics(self) -> dict[str, float]:
        return {"epoch": self._next / self.num_tasks}
