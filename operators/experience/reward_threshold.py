"""Keep rows whose reward lies in a range.

- reward_threshold: {min: 0.5}
- reward_threshold: {min: 0, max: 0.9}
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import model_validator

from operators.base import Operator, StageConfig, StageOutcome


class RewardThreshold(Operator):
    """Drops each row with reward < `min` or reward > `max`, and rows whose reward is null or NaN."""

    class Config(StageConfig):
        """`min`, `max`: bounds, both inclusive; at least one is needed."""

        min: float | None = None
        max: float | None = None

        @model_validator(mode="after")
        def _one_bound_at_least(self) -> RewardThreshold.Config:
            if self.min is None and self.max is None:
                raise ValueError("give min, max or both")
            if self.min is not None and self.max is not None and self.min > self.max:
                raise ValueError(f"min {self.min:g} is above max {self.max:g}, so no row could stay")
            return self

    reads = frozenset({"reward"})
    rowwise = True

    def apply(self, table: pa.Table) -> StageOutcome:
        # Vectorised decision first: texts are made only for the rows that go.
        reward = table["reward"].combine_chunks()
        keep = pc.fill_null(pc.invert(pc.is_nan(reward)), False)
        if self.config.min is not None:
            keep = pc.and_(keep, pc.fill_null(pc.greater_equal(reward, self.config.min), False))
        if self.config.max is not None:
            keep = pc.and_(keep, pc.fill_null(pc.less_equal(reward, self.config.max), False))
        reasons: list[str | None] = [
            None if kept else self._reason(value) for kept, value in zip(keep.to_pylist(), reward.to_pylist())
        ]
        return StageOutcome(pa.array(reasons, pa.string()))

    def _reason(self, reward: float | None) -> str:
        if reward is None:
            return "reward is null"
        if self.config.min is not None and reward < self.config.min:
            return f"reward {reward:g} < min {self.config.min:g}"
        if self.config.max is not None and reward > self.config.max:
            return f"reward {reward:g} > max {self.config.max:g}"
        return "reward is NaN"
