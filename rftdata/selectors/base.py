"""What a selector is: five methods, called under the run's planning lock by whichever explorer plans.

A selector sees the ids of a taskset's active tasks, ascending, which is loading order. They may change between two plans: people
exclude tasks and load more while a run trains, so what a selector remembers it remembers by id, never by position.

Its memory is in two places. What it learned is `rft.task_observation`: every explorer keeps a selector of its own between plans and
gives it each outcome once, in the order in which the run's plans applied them; a new process makes a new selector and gives it
all of them again. So a selector must be a function of its tasks and of the calls of `observe` so far, and the same for equal ones. What
else must survive (a cursor, an epoch, how often it drew random numbers) is `state_dict`: a few numbers, saved with the groups
planned in one transaction, so that a crash neither skips nor repeats a task. `load_state_dict` comes after the outcomes that had been
learned when the state was saved.

It runs without a database as well: `build_selector(name, args, task_ids, seed)`, then `set_features` if it has `feature_keys`, then
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
    """One outcome at a task, active or not.

    Attributes:
        successes: sum of rewards clipped to [0, 1]; of a correction, by how much it changed.
        trials: rollouts that count; of a correction, by how many they changed.
        kind: as in rft.observation_kind: explicit, implicit, manual or correction.
        group: ordinal in the run of the group that was tried, or whose outcome is corrected; None for a person's.
        seq: the plan in which the run learned it; all of one call of `observe` have the same.
        corrects: of a correction, `seq` of what it corrects.
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
    """An outcome as it is after a correction, or after a person's change."""
    return replace(old, successes=old.successes + change.successes, trials=old.trials + change.trials)


@dataclass(frozen=True)
class Screening:
    """Try `rollouts` of a group first; go on only where their pass rate lies between `low` and `high`, both excluded."""

    rollouts: int
    low: float
    high: float

    def refusal(self, successes: float, trials: float) -> str | None:
        """Why a group is not worth its other rollouts; None where it is, or where no first rollout counts."""
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
        feature_keys: keys of rft.task.features that it needs, as numbers; set by the constructor.
        screening: which groups explorers give up after a few rollouts; None for none.
        groups_per_step: groups of one trainer step, set by the planner; None where nobody said.
    """

    feature_keys: Sequence[str] = ()
    screening: Screening | None = None
    groups_per_step: float | None = None

    def __init__(self, task_ids: TaskIds, seed: int) -> None:
        self.task_ids = task_ids
        self.seed = seed

    @property
    def learns(self) -> bool:
        """Whether outcomes matter to it; one to which they do not is not given them."""
        return type(self).observe is not DeafSelector.observe

    @abstractmethod
    def select(self, count: int) -> list[int]:
        """Ids of the next `count` tasks, all different as long as there are so many."""

    @abstractmethod
    def observe(self, observations: Sequence[Observation]) -> None:
        """Learn from outcomes, each given exactly once."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart beside the outcomes, as JSON."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state, which may have been saved over other tasks."""

    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """Numbers worth plotting."""

    def set_features(self, features: Mapping[str, Floats]) -> None:
        """Take the numbers of `feature_keys`, [num_tasks] each in the order of the ids; called before anything else."""
        self.features = dict(features)

    def retire(self, task_ids: Sequence[int]) -> bool:
        """Choose these tasks no more; at least one other is left. False: this selector cannot, and is made anew over the others."""
        return False


class DeafSelector(Selector):
    """One whose choices do not depend on outcomes, unless a subclass listens to them."""

    def observe(self, observations: Sequence[Observation]) -> None:
        """Outcomes change nothing."""
