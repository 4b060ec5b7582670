"""Keep rows for which a column, a metric or a formula lies in a range: the deciding half of every score.

    - threshold: {column: quality, min: 0.3}
    - threshold: {column: metrics.accuracy, min: 0.5, "null": keep}
    - threshold: {column: num_response_tokens / num_prompt_tokens, max: 20}

The score stays where it was computed, so that another bound needs no new computation. `column` is a column of the batch (those that
earlier stages scored are among them) or an [expression](#expressions).
"""

from __future__ import annotations

from typing import Literal

import pyarrow as pa
from pydantic import Field, model_validator

from operators.base import Operator, StageConfig, StageOutcome
from operators.bounds import check_bounds, outside
from operators.expression import Expression


class Threshold(Operator):
    """Drops each row with a value < `min` or > `max`; one that is null or NaN as `null` says."""

    class Config(StageConfig):
        """At least one bound is needed."""

        column: str = Field(description="A column, a metric (`metrics.quality`) or an expression over them.")
        min: float | None = Field(None, description="Least value that stays.")
        max: float | None = Field(None, description="Greatest value that stays.")
        null: Literal["drop", "keep"] = Field("drop", description="What becomes of rows without a value (null or NaN).")

        @model_validator(mode="after")
        def _one_bound_at_least(self) -> Threshold.Config:
            check_bounds(self.min, self.max)
            return self

    def __init__(self, config: StageConfig) -> None:
        super().__init__(config)
        self._value = Expression(self.config.column, pa.float64())
        self.reads = self._value.columns
        self.rowwise = self._value.rowwise

    def validate_schema(self, schema: pa.Schema) -> pa.Schema:
        self._value.bind(schema)
        return super().validate_schema(schema)

    def apply(self, table: pa.Table) -> StageOutcome:
        column = self.config.column
        shown = f"{column} =" if " " in column else column
        return outside(
            self._value.evaluate(table),
            shown,
            self.config.min,
            self.config.max,
            keep_unknown=self.config.null == "keep",
        )

    def close(self) -> None:
        self._value.close()
