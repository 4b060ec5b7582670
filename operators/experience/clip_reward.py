"""Bound the reward: reward := min(max(reward, `min`), `max`).

    - clip_reward: {min: -1, max: 1}

One bound alone leaves the other side open.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field, model_validator

from operators.base import Operator, StageConfig, StageOutcome
from operators.thresholds import check_bounds


class ClipReward(Operator, revision=1):
    """Moves rewards outside the bounds onto them, infinite ones too; null stays null and NaN stays NaN."""

    class Config(StageConfig):
        """At least one bound is needed."""

        min: float | None = Field(None, description="Rewards below are raised to it.")
        max: float | None = Field(None, description="Rewards above are lowered to it.")

        @model_validator(mode="after")
        def _one_bound_at_least(self) -> ClipReward.Config:
            check_bounds(self.min, self.max)
            return self

    reads = frozenset({"reward"})
    writes = frozenset({"reward"})
    rowwise = True

    def apply(self, table: pa.Table) -> StageOutcome:
        reward = given = table["reward"].combine_chunks()
        if self.config.min is not None:
            reward = pc.max_element_wise(reward, float(self.config.min), skip_nulls=False)
        if self.config.max is not None:
            reward = pc.min_element_wise(reward, float(self.config.max), skip_nulls=False)
        # Element-wise bounds prefer a number to NaN, which would make a broken reward look like a fine one.
        return StageOutcome.keep_all(table.num_rows, {"reward": pc.if_else(pc.is_nan(given), given, reward)})
