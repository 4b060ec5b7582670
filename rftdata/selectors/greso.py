"""GRESO: mostly skips, before any rollout, tasks whose latest groups had no learning signal (arXiv 2506.02177).

A group has no signal if all its rollouts succeeded or all failed. A task with `z` such groups in a row, up to its newest one, is
skipped in an epoch with probability 1 - p^z (probabilistic filtering). p is the probability to explore the task; there is one p for
too easy and one for too hard tasks, by the task's newest outcome. After each update both move by `adjust` towards the value at
which the share of such groups meets its target (the paper's self-adjustable base exploration probability): down if there are too
many, up otherwise.

Equal rewards between 0 and 1 count as a signal, because outcomes are stored as successes and trials.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rftdata.selectors.arguments import number
from rftdata.selectors.base import Floats, Ids, Observation, TaskIds, changed_outcome
from rftdata.selectors.shuffle import Shuffle, split_mix
from rftdata.selectors.table import Flags

_LONGEST = 32
"""Number of outcomes remembered per task; a longer streak hardly changes the probability."""
_PATIENCE = 3
"""Number of epochs after which tasks are selected without the filter."""


class Greso(Shuffle):
    """Shuffled tasks, some of them skipped.

    Args:
        explore_easy, explore_hard: initial probabilities to try a task again after one group of only successes, only failures.
        target_easy, target_hard: target shares of such groups.
        adjust: change of the probabilities per trainer step.
    """

    def __init__(
        self,
        task_ids: TaskIds,
        seed: int,
        *,
        explore_easy: float = 0.5,
        explore_hard: float = 0.5,
        target_easy: float = 1 / 12,
        target_hard: float = 1 / 6,
        adjust: float = 0.01,
    ) -> None:
        super().__init__(task_ids, seed)
        given = {
            "explore_easy": explore_easy,
            "explore_hard": explore_hard,
            "target_easy": target_easy,
            "target_hard": target_hard,
        }
        for name, value in {**given, "adjust": adjust}.items():
            number("greso", name, value, 0, 1)
        self._explore = {"easy": explore_easy, "hard": explore_hard}
        # Never quite 0 or 1, unless configured so.
        self._bounds = {kind: (min(p, 0.05), max(p, 0.95)) for kind, p in self._explore.items()}
        self._target = {"easy": target_easy, "hard": target_hard}
        self._adjust = adjust
        self._outcomes: dict[int, list[Observation]] = {}
        self._streak = np.zeros(len(self.table), dtype=np.int8)
        self._is_easy = np.zeros(len(self.table), dtype=np.bool_)
        self._patient_until = 0

    def select(self, count: int) -> list[int]:
        self._patient_until = self._epoch + _PATIENCE
        return super().select(count)

    def skip_probability(self, positions: Ids) -> Floats:
        """Return 1 - p^z of the tasks at these positions."""
        explore = np.where(self._is_easy[positions], self._explore["easy"], self._explore["hard"])
        kept: Floats = explore ** self._streak[positions]
        return 1 - kept

    def wanted(self, positions: Ids, epoch: int) -> Flags:
        open_ones = self.table.open[positions]
        if epoch >= self._patient_until:
            return open_ones
        # Drawn from epoch and task alone, so that a restart skips the same tasks.
        drawn = split_mix((self.seed, epoch, 1), self.table.ids[positions]) / 2.0**64
        wanted: Flags = open_ones & (drawn >= self.skip_probability(positions))
        return wanted

    def observe(self, observations: Sequence[Observation]) -> None:
        for observation in observations:
            self._remember(observation)
        changed = {o.task_id for o in observations}
        for task_id, position in zip(changed, self.table.positions(changed).tolist()):
            if position >= 0:
                self._streak[position], self._is_easy[position] = self._streak_of(task_id)
        self._adjust_exploration([o for o in observations if o.kind == "explicit" and o.trials > 0])

    def metrics(self) -> dict[str, float]:
        return {
            **super().metrics(),
            "explore_easy": self._explore["easy"],
            "explore_hard": self._explore["hard"],
            "taught_nothing": float(np.count_nonzero(self._streak)),
        }

    def _remember(self, o: Observation) -> None:
        """Add an outcome to those of its task, or change the outcome that it corrects."""
        known = self._outcomes.setdefault(o.task_id, [])
        if o.kind == "correction":
            for i, old in enumerate(known):
                if old.group == o.group:
                    known[i] = changed_outcome(old, o)
                    return
            if o.trials <= 0:
                return  # corrects an outcome that is no longer remembered
        elif o.kind == "manual" and known:
            # A person's change applies to the newest outcome.
            known[-1] = changed_outcome(known[-1], o)
            return
        known.append(o)
        del known[:-_LONGEST]

    def _streak_of(self, task_id: int) -> tuple[int, bool]:
        """Return (streak of groups without a signal, whether the newest of them was all successes)."""
        outcomes = [o for o in self._outcomes[task_id] if o.trials > 0]
        streak = 0
        for o in reversed(outcomes):
            if _verdict(o) is None:
                break
            streak += 1
        return streak, bool(outcomes) and _verdict(outcomes[-1]) == "easy"

    def _adjust_exploration(self, outcomes: Sequence[Observation]) -> None:
        """Move both probabilities towards the values at which the shares of groups without a signal meet their targets."""
        if not outcomes:
            return
        # Fewer outcomes than a step's move the probabilities in proportion.
        by = self._adjust * (len(outcomes) / self.groups_per_step if self.groups_per_step else 1.0)
        for kind, target in self._target.items():
            share = sum(_verdict(o) == kind for o in outcomes) / len(outcomes)
            least, most = self._bounds[kind]
            self._explore[kind] = min(max(self._explore[kind] + (-by if share >= target else by), least), most)


def _verdict(o: Observation) -> str | None:
    """Return why an outcome has no signal, easy or hard; None if it has one."""
    if o.successes >= o.trials - 1e-9:
        return "easy"
    return "hard" if o.successes <= 1e-9 else None
