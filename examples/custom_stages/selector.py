"""A custom selector: half of the groups try something new, the others tasks of medium difficulty."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rftdata.selectors import Observation, Selector


class Curious(Selector):
    """Alternates untried tasks, in loading order, with those whose pass rate is nearest to `target`.

    Args:
        target: the pass rate worth training on.
    """

    def __init__(self, task_ids: Sequence[int], seed: int, target: float = 0.5) -> None:
        super().__init__(task_ids, seed)
        self.target = target
        self._outcomes: dict[int, tuple[float, float]] = {}  # task -> successes, trials
        self._next = 0  # index of the next untried task

    def select(self, count: int) -> list[int]:
        known = sorted(self._outcomes.keys() & set(self.task_ids), key=self._distance)
        chosen: dict[int, None] = dict.fromkeys(known[: count // 2])
        while len(chosen) < min(count, len(self.task_ids)):
            chosen.setdefault(int(self.task_ids[self._next % len(self.task_ids)]))
            self._next += 1
        return (list(chosen) * -(-count // len(chosen)))[:count]

    def observe(self, observations: Sequence[Observation]) -> None:
        for seen in observations:
            successes, trials = self._outcomes.get(seen.task_id, (0.0, 0.0))
            self._outcomes[seen.task_id] = successes + seen.successes, trials + seen.trials

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = state["next"]

    def metrics(self) -> dict[str, float]:
        return {"num_known": float(len(self._outcomes))}

    def _distance(self, task_id: int) -> tuple[float, int]:
        successes, trials = self._outcomes[task_id]
        return abs(successes / max(trials, 1.0) - self.target), task_id
