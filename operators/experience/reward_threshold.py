"""Keep rows whose reward lies in a range.

    - reward_threshold: {min: 0.5}
    - reward_threshold: {min: 0, max: 0.9}

For other columns, metrics and scores use `threshold`.
"""

from __future__ import annotations

import pyarrow as pa
from pydantic import Field, model_validator

from operators.base import Operator, StageConfig, StageOutcome
from operators.thresholds import check_bounds, outside


class RewardThreshold(Operator, revision=1):
    """Drops each row with reward < `min` or reward > `max`, and rows whose reward is null or NaN."""

    class Config(StageConfig):
        """At least one bound is required."""

        min: float | None = Field(None, description="Smallest reward that stays.")
        max: float | None = Field(None, description="Largest reward that stays.")

        @model_validator(mode="after")
        def _one_bound_at_least(self) -> RewardThreshold.Config:
            check_bounds(self.min, self.max)
            return self

    reads = frozenset({"reward"})
    rowwise = True

    def apply(self, table: pa.Table) -> StageOutcome:
        return outside(table["reward"].combine_chunks(), "reward", self.config.min, self.config.max)
