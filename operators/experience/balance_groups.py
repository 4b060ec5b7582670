"""DAPO's dynamic sampling: keep groups that are neither all correct nor all wrong.

    - balance_groups: {}
    - balance_groups: {column: metrics.accuracy, correct_above: 0.5, min_pass_rate: 0.1, max_pass_rate: 0.9}
    - balance_groups: {equalize: true}

arXiv 2503.14476, section 3.2 and the constraint of eq. 11: 0 < |{o_i : o_i is correct}| < G. Here the pass rate
p = num_correct / G must lie strictly between two bounds; 0 and 1 are the paper's. The place of a dropped group returns to the planner,
which plans another group for the same step (`explorer.max_refill`), so the trainer's batch is full, as in the paper.

With `equalize`, a group that stays also loses the surplus of its larger side, so that as many rollouts are correct as wrong. Rollouts of
a group are exchangeable, so the ones with the highest rollout_index are dropped: always the same ones.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field, model_validator

from operators.base import StageConfig, StageOutcome
from operators.groups import Correct, Groups, fewest_first
from operators.sql.formula import FormulaOperator


class BalanceGroups(FormulaOperator, revision=1):
    """Drops each group whose pass rate is outside the bounds; with `equalize`, also surplus rollouts of the other groups.

    A rollout without a value (null, NaN, infinite) is neither correct nor wrong and is not counted; with `equalize` it is dropped.
    """

    class Config(StageConfig):
        """What counts as correct, and which pass rates stay."""

        column: str = Field("reward", description="The value to decide by: a column, a metric or an expression.")
        correct_above: float = Field(0.0, description="A rollout is correct if its value is greater.")
        min_pass_rate: float = Field(0.0, ge=0, lt=1, description="The pass rate must be greater.")
        max_pass_rate: float = Field(1.0, gt=0, le=1, description="The pass rate must be less.")
        equalize: bool = Field(False, description="Also drop rollouts until as many are correct as are wrong.")

        @model_validator(mode="after")
        def _bounds_in_order(self) -> BalanceGroups.Config:
            if self.min_pass_rate >= self.max_pass_rate:
                raise ValueError(
                    f"min_pass_rate {self.min_pass_rate:g} is not below max_pass_rate {self.max_pass_rate:g}, so no group could stay"
                )
            return self

    argument = "column"

    def __init__(self, config: StageConfig) -> None:
        super().__init__(config)
        self.reads = self.formula.columns | {"group_id", "rollout_index", "role"}
        self.rowwise = False

    def apply(self, table: pa.Table) -> StageOutcome:
        groups = Groups.by_role(table)
        correct = Correct.of(groups, self.formula.evaluate(table), self.config.correct_above)
        reasons_G = pa.array(
            [self._reason(*counts) for counts in zip(correct.num_correct_G.tolist(), correct.num_known_G.tolist())],
            pa.string(),
        )
        reasons = reasons_G.take(pa.array(groups.group_N))
        if self.config.equalize:
            reasons = pc.coalesce(reasons, self._surplus(groups, correct))
        return StageOutcome(reasons)

    def _reason(self, num_correct: int, num_known: int) -> str | None:
        if not num_known:
            return f"no rollout of the group has a value of {self.config.column}"
        rate, counted = num_correct / num_known, f"{num_correct} of {num_known} rollouts are correct"
        if rate <= self.config.min_pass_rate:
            return f"{counted}: the pass rate is not above {self.config.min_pass_rate:g}"
        if rate >= self.config.max_pass_rate:
            return f"{counted}: the pass rate is not below {self.config.max_pass_rate:g}"
        return None

    @staticmethod
    def _surplus(groups: Groups, correct: Correct) -> pa.Array:
        """Return reasons for rollouts beyond the size of the smaller side of their group."""
        smaller_G = np.minimum(correct.num_correct_G, correct.num_known_G - correct.num_correct_G)
        side_R = groups.group_R * 3 + np.where(correct.known_R, correct.correct_R, 2)
        # Rollouts are numbered by their rollout_index within a group.
        place_R = fewest_first(np.arange(groups.num_rollouts), side_R)
        surplus_R = place_R >= smaller_G[groups.group_R]
        words = np.array(["wrong", "correct"])[correct.correct_R.astype(int)]
        text = pc.binary_join_element_wise("surplus: the group has fewer rollouts that are not", pa.array(words), " ")
        text = pc.if_else(pa.array(correct.known_R), text, "neither correct nor wrong: it has no value")
        return pc.if_else(pa.array(surplus_R | ~correct.known_R), text, pa.scalar(None, pa.string())).take(
            pa.array(groups.rollout_N)
        )
