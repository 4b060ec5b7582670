"""Tasks at random: each choice is drawn from all tasks, without repetition within it and independently of earlier choices."""

from __future__ import annotations

import numpy as np

from rftdata.selectors.base import Ids, NonAdaptiveSelector
from rftdata.selectors.table import DrawnSelector, draw_distinct


class Random(NonAdaptiveSelector, DrawnSelector):
    """Uniform; only counts its draws."""

    def _choose(self, rng: np.random.Generator, size: int) -> Ids:
        return draw_distinct(rng, self.table.open, size)

    def metrics(self) -> dict[str, float]:
        return {"draws": float(self._draws)}
