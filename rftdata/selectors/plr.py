"""Prioritised level replay: tasks with the largest learning potential when last tried, and tasks tried long ago (arXiv 2010.03934).

A choice is a replay with probability `replay`, else a task never tried, all equally likely. A replayed task i has probability
P(i) = (1 - staleness) · P_S(i) + staleness · P_C(i) (the paper's P_replay): P_S is proportional to (1 / rank of its score) ^ (1 / temperature),
and P_C to the number of outcomes since its own. The paper's score is the mean absolute advantage of the newest episode. For a group
with mean reward p as baseline and rewards 0 and 1 it is 2 p (1 - p).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rftdata.selectors.arguments import number
from rftdata.selectors.base import Floats, Ids, Observation, TaskIds
from rftdata.selectors.table import DrawnSelector, draw_distinct


class PrioritizedLevelReplay(DrawnSelector):
    """Keeps scores and times of the tasks tried so far.

    Args:
        temperature: temperature of the ranks; small values prefer the highest scores.
        staleness: weight of the time since a task was tried.
        replay: probability to choose a task tried before; None is the share of tasks tried before, as in the paper, which is
            near 0 with very many tasks.
    """

    def __init__(
        self,
        task_ids: TaskIds,
        seed: int,
        *,
        temperature: float = 0.1,
        staleness: float = 0.1,
        replay: float | None = None,
    ) -> None:
        super().__init__(task_ids, seed)
        number("plr", "temperature", temperature, 1e-3, float("inf"))
        number("plr", "staleness", staleness, 0, 1)
        if replay is not None:
            number("plr", "replay", replay, 0, 1)
        self._temperature, self._staleness, self._replay = temperature, staleness, replay
        self._num_replayed = 0
        self._clock = 0
        self._slot: dict[int, int] = {}  # position -> index in the arrays below
        self._positions = np.zeros(64, dtype=np.int64)
        self._newest: list[tuple[int | None, float, float]] = []  # group, successes, trials
        self._scores = np.zeros(64)
        self._tried_at = np.zeros(64)
        self._untried = np.ones(len(self.table), dtype=np.bool_)
        self._num_untried = len(self.table)

    def probabilities(self) -> tuple[Ids, Floats]:
        """Return the positions of the open tasks tried before, and P of each."""
        tried = np.arange(len(self._slot))
        tried = tried[self.table.open[self._positions[tried]]]
        if not len(tried):
            return self._positions[tried], np.zeros(0)
        ranks = np.empty(len(tried))
        ranks[np.argsort(-self._scores[tried], kind="stable")] = np.arange(1, len(tried) + 1)
        weights = np.exp(-np.log(ranks) / self._temperature)
        ages = self._clock - self._tried_at[tried]
        by_age = ages / ages.sum() if ages.sum() > 0 else np.full(len(tried), 1 / len(tried))
        return self._positions[tried], (1 - self._staleness) * weights / weights.sum() + self._staleness * by_age

    def observe(self, observations: Sequence[Observation]) -> None:
        places = self.table.positions(o.task_id for o in observations)
        for o, position in zip(observations, places.tolist()):
            if position < 0:
                continue
            if o.kind == "correction" or (o.kind == "manual" and position in self._slot):
                self._correct(position, o)
            elif o.trials > 0:
                self._clock += 1
                slot = self._slot_of(position)
                self._newest[slot] = (o.group, o.successes, o.trials)
                self._tried_at[slot] = self._clock
                self._score(slot)

    def metrics(self) -> dict[str, float]:
        tried = len(self._slot)
        mean = float(self._scores[:tried].mean()) if tried else 0.0
        return {"tried": float(tried), "replayed": float(self._num_replayed), "mean_score": mean}

    def retire(self, task_ids: Sequence[int]) -> bool:
        super().retire(task_ids)
        places = self.table.positions(task_ids)
        self._close(places[places >= 0])
        return True

    def _choose(self, rng: np.random.Generator, size: int) -> Ids:
        positions, probabilities = self.probabilities()
        share = self._replay if self._replay is not None else len(self._slot) / len(self.table)
        replayed = int(rng.binomial(size, share))
        replayed = min(max(replayed, size - self._num_untried), len(positions))
        self._num_replayed = replayed
        # The largest log P + Gumbel noise are draws without replacement, one after the other.
        with np.errstate(divide="ignore"):
            keys = np.log(probabilities) - np.log(rng.standard_exponential(len(positions)))
        best = np.argpartition(-keys, replayed - 1)[:replayed] if replayed else np.zeros(0, dtype=np.int64)
        return np.concatenate([positions[best], draw_distinct(rng, self._untried, size - replayed)])

    def _correct(self, position: int, o: Observation) -> None:
        slot = self._slot.get(position)
        if slot is None:
            if o.trials <= 0:
                return
            slot = self._slot_of(position)  # its rewards were pending until now
            self._clock += 1
            self._tried_at[slot] = self._clock
            self._newest[slot] = (o.group, 0.0, 0.0)
        group, successes, trials = self._newest[slot]
        # Corrections of older outcomes have no effect; a person's change applies to the newest outcome.
        if group == o.group or o.kind == "manual":
            self._newest[slot] = (group, successes + o.successes, trials + o.trials)
            self._score(slot)

    def _score(self, slot: int) -> None:
        _, successes, trials = self._newest[slot]
        rate = min(max(successes / trials, 0.0), 1.0) if trials > 0 else 0.0
        self._scores[slot] = 2 * rate * (1 - rate)

    def _slot_of(self, position: int) -> int:
        slot = self._slot.get(position)
        if slot is None:
            slot = self._slot[position] = len(self._newest)
            self._newest.append((None, 0.0, 0.0))
            if slot == len(self._scores):
                self._positions, self._scores, self._tried_at = (
                    np.concatenate([column, np.zeros_like(column)])
                    for column in (self._positions, self._scores, self._tried_at)
                )
            self._positions[slot] = position
            self._close(np.array([position]))
        return slot

    def _close(self, positions: Ids) -> None:
        """Remove these from the tasks never tried."""
        positions = np.unique(positions)
        self._num_untried -= int(self._untried[positions].sum())
        self._untried[positions] = False
