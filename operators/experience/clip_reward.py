"""Clip the reward: reward := min(max(reward, `min`), `max`).

    - clip_reward: {min: -1, max: 1}

With a single bound the other side is open.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field, model_validator

from operators.base import Operator, StageConfig, StageOutcome
from operators.thresholds import check_bounds


class ClipReward(Operator, revision=1):
    """Clips rewards, including infinite ones, to the bounds; null stays null and NaN stays NaN."""

    class Config(StageConfig):
        """At least one bound is required."""

        min: float | None = Field(None, description="Lower rewards are raised to it.")
        max: float | None = Field(None, description="Higher rewards are lowered to it.")

        @model_validator(mode="after")
        def _one_bound_at_least(self) -> ClipReward.Config:
            check_bounds(self.min, self.max)
            return self

    reads = frozenset({"reward"})
    writes = frozenset({"reward"})
    rowwise = True

    def apply(self, table: pa.Table) -> StageOutcome:
        reward = before = table["reward"].combine_chunks()
        if self.config.min is not None:
            reward = pc.max_element_wise(reward, float(self.config.min), skip_nulls=False)
        if self.config.max is not None:
            reward = pc.min_element_wise(reward, float(self.config.max), skip_nulls=False)
        # Element-wise bounds prefer a number to NaN, which would turn a broken reward into a valid one.
        return StageOutcome.keep_all(table.num_rows, {"reward": pc.if_else(pc.is_nan(before), before, reward)})
