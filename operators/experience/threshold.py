"""Keep rows for which a column, a metric or a formula lies in a range: the decision that follows a score.

    - threshold: {column: quality, min: 0.3}
    - threshold: {column: metrics.accuracy, min: 0.5, "null": keep}
    - threshold: {column: num_response_tokens / num_prompt_tokens, max: 20}

The score is stored where it was computed, so that another bound needs no new computation. `column` is a column of the batch (including
the scores of earlier stages) or an [expression](#expressions).
"""

from __future__ import annotations

from typing import Literal

import pyarrow as pa
from pydantic import Field, model_validator

from operators.base import StageConfig, StageOutcome
from operators.sql.formula import FormulaOperator
from operators.thresholds import check_bounds, outside


class Threshold(FormulaOperator, revision=1):
    """Drops each row with a value < `min` or > `max`; `null` decides on null and NaN."""

    class Config(StageConfig):
        """At least one bound is required."""

        column: str = Field(description="A column, a metric (`metrics.quality`) or an expression over them.")
        min: float | None = Field(None, description="Smallest value that stays.")
        max: float | None = Field(None, description="Largest value that stays.")
        null: Literal["drop", "keep"] = Field("drop", description="Whether rows without a value (null or NaN) stay.")

        @model_validator(mode="after")
        def _one_bound_at_least(self) -> Threshold.Config:
            check_bounds(self.min, self.max)
            return self

    argument = "column"

    def apply(self, table: pa.Table) -> StageOutcome:
        column = self.config.column
        subject = f"{column} =" if " " in column else column
        return outside(
            self.formula.evaluate(table),
            subject,
            self.config.min,
            self.config.max,
            keep_unknown=self.config.null == "keep",
        )
