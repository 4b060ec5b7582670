"""How hard a task is: the column and feature `difficulty`, in [0, 1] from easy to hard.

    guess      = mean over `features` of the number's place between its easy and its hard bound; 0.5 if a task has none
    difficulty = (prior_groups · guess + attempts · (1 − reward)) / (prior_groups + attempts)

`attempts` is the number of groups that any run observed on the task and `reward` their mean reward, clipped to [0, 1]
(`rft.task_stat`). Prior knowledge counts as much as `prior_groups` observed groups, and less the more is observed. A pass rate that
another model measured beforehand is given with reversed bounds: `{pass_rate: [1, 0]}`.

    - difficulty_score: {}
    - difficulty_score: {features: {level: [1, 5], pass_rate_7b: [1, 0]}, prior_groups: 4}
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
from pydantic import Field, model_validator

from operators.base import Operator, StageConfig, StageOutcome
from operators.task.numbers import as_array, columns_for, keys_for, numbers, place_in_range


class DifficultyScore(Operator, revision=1):
    """Adds `difficulty`, by the formula above."""

    class Config(StageConfig):
        """Prior knowledge, and its weight."""

        features: dict[str, tuple[float, float]] = Field(
            default_factory=dict,
            description="Name of a number -> [easy, hard]; the mean of their places in these ranges is the guess.",
        )
        prior_groups: float = Field(1.0, gt=0, description="Number of observed groups that the guess is worth.")

        @model_validator(mode="after")
        def _ranges_are_ranges(self) -> DifficultyScore.Config:
            for name, (easy, hard) in self.features.items():
                if easy == hard:
                    raise ValueError(f"the range of {name} is empty: [{easy:g}, {hard:g}]")
            return self

    reads = frozenset({"reward", "attempts"})
    scores: Mapping[str, pa.DataType] = {"difficulty": pa.float64()}
    rowwise = True

    def validate_schema(self, schema: pa.Schema) -> pa.Schema:
        self.reads = frozenset({"reward", "attempts"}) | columns_for(self.config.features, schema)
        self.keys = keys_for(self.config.features, schema)
        return super().validate_schema(schema)

    def apply(self, table: pa.Table) -> StageOutcome:
        places = [place_in_range(numbers(table, name), *bounds) for name, bounds in self.config.features.items()]
        guess = _mean(places, table.num_rows)
        attempts = np.nan_to_num(numbers(table, "attempts"))
        failed = 1.0 - np.clip(numbers(table, "reward"), 0.0, 1.0)
        attempts = np.where(np.isnan(failed), 0.0, attempts)
        prior = self.config.prior_groups
        difficulty = (prior * guess + attempts * np.nan_to_num(failed)) / (prior + attempts)
        return StageOutcome.keep_all(table.num_rows, {"difficulty": as_array(difficulty)})


def _mean(places: list[np.ndarray], num_rows: int) -> np.ndarray:
    """Return the mean of the places that a task has; 0.5 if it has none."""
    total, count = np.zeros(num_rows), np.zeros(num_rows)
    for place in places:
        total += np.nan_to_num(place)
        count += ~np.isnan(place)
    return np.where(count > 0, total / np.maximum(count, 1), 0.5)
