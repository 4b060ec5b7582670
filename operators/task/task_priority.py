"""One number to order tasks by: the column and feature `priority`, a weighted sum of scores. Higher ones are tried earlier.

    priority = Σ over weights of weight · score

A missing score counts as its neutral value: 0 for usage_frequency, 0.5 for any other. The default weights favour well written, diverse
and easy tasks that were used little: difficulty −0.7, quality 1, diversity 0.8 and usage_frequency −0.5. Only scores that an earlier
stage computed count. `weights` replaces all of them and may name any number: a column, or a key of the task's features or metadata.

    - task_priority: {}
    - task_priority: {weights: {difficulty: 1, quality: 0.5}}
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from pydantic import Field, field_validator

from operators.base import Operator, StageConfig, StageOutcome
from operators.task.numbers import as_array, columns_for, keys_for, numbers
from rftdata.errors import ConfigError

DEFAULT_WEIGHTS = {"difficulty": -0.7, "quality": 1.0, "diversity": 0.8, "usage_frequency": -0.5}
NEUTRAL = {"usage_frequency": 0.0}
NEUTRAL_ELSE = 0.5


class TaskPriority(Operator, revision=1):
    """Sets `priority`, by the formula above."""

    class Config(StageConfig):
        """The weights of the scores."""

        weights: dict[str, float] | None = Field(
            None,
            description="Name of a number -> its weight; by default the above, for the scores that earlier stages computed.",
        )

        @field_validator("weights")
        @classmethod
        def _something_counts(cls, weights: dict[str, float] | None) -> dict[str, float] | None:
            if weights is not None and not any(weights.values()):
                raise ValueError("all weights are 0, so every task would have the same priority")
            return weights

    writes = frozenset({"priority"})
    rowwise = True

    def __init__(self, config: StageConfig) -> None:
        super().__init__(config)
        self._weights: dict[str, float] = dict(self.config.weights or {})

    def validate_schema(self, schema: pa.Schema) -> pa.Schema:
        if self.config.weights is None:
            self._weights = {name: weight for name, weight in DEFAULT_WEIGHTS.items() if name in schema.names}
            if not self._weights:
                raise ConfigError(
                    "no stage before this one scores anything",
                    allowed=", ".join(DEFAULT_WEIGHTS),
                    todo="put quality_score, difficulty_score, diversity_score or usage_frequency before it, or give weights",
                )
        self.reads = columns_for(self._weights, schema)
        self.keys = keys_for(self._weights, schema)
        return super().validate_schema(schema)

    def spec(self) -> dict[str, object]:
        return {"weights": self._weights}

    def apply(self, table: pa.Table) -> StageOutcome:
        priority = np.zeros(table.num_rows)
        for name, weight in self._weights.items():
            score = numbers(table, name)
            priority += weight * np.where(np.isnan(score), NEUTRAL.get(name, NEUTRAL_ELSE), score)
        return StageOutcome.keep_all(table.num_rows, {"priority": as_array(priority)})
