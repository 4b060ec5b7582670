"""Variants of `rft bench replay`: how a run samples, draws and weighs experiences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

DONOR = "once"
_VALUE = "mean_reward * (1 - mean_reward)"
_SELECTION = "select {columns} from rft.v_group where run = 'replay' and mean_reward > 0 and mean_reward < 1"


@dataclass(frozen=True)
class ReplayBudget:
    """Sizes of a run, the same for all variants.

    Attributes:
        steps: trainer steps on rollouts of the run itself.
        window: steps for which a group may be drawn again.
        evaluate_every: steps between two evaluations.
        smoothing: evaluations whose mean is compared with the target.
    """

    batch_groups: int = 16
    group_size: int = 8
    steps: int = 160
    window: int = 8
    evaluate_every: int = 4
    smoothing: int = 5
    target: float = 0.68
    learning_rate: float = 2.0e-4


@dataclass(frozen=True)
class Variant:
    """Use of experiences in a run.

    Attributes:
        uses: times that a group is drawn on average.
        prioritized: whether groups with right and wrong answers are drawn more often.
        corrected: whether tokens are weighed by importance.
        from_stored: whether the run begins with the groups of the run `once`.
    """

    uses: int = 1
    prioritized: bool = False
    corrected: bool = True
    from_stored: bool = False

    def sampling(self, budget: ReplayBudget) -> dict[str, Any]:
        """Return the section `sampling` for the run's own rollouts."""
        if self.uses == 1:
            return {}
        section: dict[str, Any] = {"order": "uniform", "max_times_sampled": 0, "max_staleness": budget.window - 1}
        if self.prioritized:
            section |= {"order": "prioritized", "priority": {"formula": _VALUE, "exponent": 1.0}}
        return section

    def algorithm(self) -> dict[str, Any]:
        """Return the keys of the section `algorithm` except the name."""
        return {"correction": {"name": "truncate", "high": 2.0}} if self.corrected else {}

    def selection(self) -> str:
        """Return the query for the stored groups with which the run begins."""
        return _SELECTION.format(columns=f"group_id, {_VALUE} as priority" if self.prioritized else "group_id")


VARIANTS = {
    DONOR: Variant(corrected=False),
    "twice": Variant(2),
    "twice_prioritized": Variant(2, prioritized=True),
    "four_times": Variant(4),
    "four_times_prioritized": Variant(4, prioritized=True),
    "four_times_uncorrected": Variant(4, corrected=False),
    "stored": Variant(from_stored=True),
    "stored_prioritized": Variant(prioritized=True, from_stored=True),
}
