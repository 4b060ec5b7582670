"""The interface of a selector: five methods, called under the run's planning lock by the explorer that plans.

A selector gets the ids of a taskset's active tasks, ascending, which is loading order. They may change between two plans, since
people exclude and load tasks while a run trains. A selector therefore remembers tasks by id, never by position.

Its memory is in two places. What it learned is `rft.task_observation`. Every explorer keeps its own selector between plans and
passes each outcome to it once, in the order in which the run's plans applied them. A new process creates a new selector and passes
all outcomes again. A selector must therefore be a deterministic function of its tasks and of the calls of `observe` so far. Anything
else that must survive (a cursor, an epoch, the number of random draws) is `state_dict`: a few numbers, saved with the planned groups
in one transaction, so that a crash neither skips nor repeats a task. `load_state_dict` is called after the outcomes that had been
learned when the state was saved.

It also runs without a database: `build_selector(name, args, task_ids, seed)`, then `set_features` if it has `feature_keys`, then
`select` and `observe` in turn.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
TaskIds = Sequence[int] | Ids


@dataclass(frozen=True)
class Observation:
    """One outcome of a task, active or not.

    Attributes:
        successes: sum of rewards clipped to [0, 1]; for a correction, the change.
        trials: number of rollouts that count; for a correction, the change.
        kind: as in rft.observation_kind: explicit, manual or correction.
        group: ordinal in the run of the tried or corrected group; None for a person's outcome.
        seq: the plan in which the run learned it; the same for all outcomes of one call of `observe`.
        corrects: for a correction, `seq` of the corrected outcome.
    """

    task_id: int
    successes: float
    trials: float
    _: KW_ONLY
    kind: str = "explicit"
    group: int | None = None
    seq: int = 0
    corrects: int | None = None


def changed_outcome(old: Observation, change: Observation) -> Observation:
    """Return an outcome after a correction, or after a person's change."""
    return replace(old, successes=old.successes + change.successes, trials=old.trials + change.trials)


@dataclass(frozen=True)
class Screening:
    """Try `rollouts` of a group first; continue only if their pass rate lies strictly between `low` and `high`."""

    rollouts: int
    low: float
    high: float

    def refusal(self, successes: float, trials: float) -> str | None:
        """Return why a group is not worth its other rollouts; None if it is, or if no first rollout counts."""
        if trials <= 0 or self.low < successes / trials < self.high:
            return None
        side = f"not above {self.low:g}" if successes / trials <= self.low else f"not below {self.high:g}"
        return f"screened out: {successes:g} of {trials:g} first rollouts succeeded, a pass rate {side}"


class Selector(ABC):
    """Chooses tasks of one taskset.

    Args:
        task_ids: its active tasks, ascending; at least one.
        seed: the run's seed.

    Attributes:
        feature_keys: numeric keys of rft.task.features that it needs; set by the constructor.
        screening: when explorers abandon a group after a few rollouts; None for never.
        groups_per_step: groups of one trainer step, set by the planner; None if unknown.
    """

    feature_keys: Sequence[str] = ()
    screening: Screening | None = None
    groups_per_step: float | None = None

    def __init__(self, task_ids: TaskIds, seed: int) -> None:
        self.task_ids = task_ids
        self.seed = seed

    @property
    def learns(self) -> bool:
        """Whether its choices depend on outcomes; otherwise it receives none."""
        return type(self).observe is not NonAdaptiveSelector.observe

    @abstractmethod
    def select(self, count: int) -> list[int]:
        """Return the ids of the next `count` tasks, all different if there are enough."""

    @abstractmethod
    def observe(self, observations: Sequence[Observation]) -> None:
        """Learn from outcomes, each passed exactly once."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return what must survive a restart in addition to the outcomes, as JSON."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state, which may have been saved with other tasks."""

    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """Return numbers worth plotting."""

    def set_features(self, features: Mapping[str, Floats]) -> None:
        """Set the numbers of `feature_keys`, each [num_tasks] in the order of the ids; called before any other method."""
        self.features = dict(features)

    def retire(self, task_ids: Sequence[int]) -> bool:
        """Stop choosing these tasks; at least one other is left. Return False if unsupported, which rebuilds it for the others."""
        return False


class NonAdaptiveSelector(Selector):
    """Base of selectors whose choices do not depend on outcomes, unless a subclass overrides `observe`."""

    def observe(self, observations: Sequence[Observation]) -> None:
        """Ignore outcomes."""
