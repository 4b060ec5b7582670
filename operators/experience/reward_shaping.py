"""Compute the reward by a formula over the columns of the row.

    - reward_shaping: {formula: "reward + 0.1 * metrics.quality - 0.05 * (num_response_tokens > 512)::INT"}
    - reward_shaping: {formula: "reward * coalesce(metrics.confidence, 1)"}
    - reward_shaping: {formula: "reward / metrics.num_turns", missing: drop}

The language is that of [expressions](#expressions). The formula is null where something it needs is missing, and no finite number where it
divides by zero; `missing` says what becomes of the row then. To add a term only where it is there, write `coalesce(…, 0)`.
"""

from __future__ import annotations

from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from operators.base import StageConfig, StageOutcome
from operators.sql.formula import FormulaOperator


class RewardShaping(FormulaOperator, revision=1):
    """Sets `reward` to the formula's value. What the verifier gave stays in `reward_sampled`, and a final label is never shaped."""

    class Config(StageConfig):
        """The formula, and what happens where it cannot be worked out."""

        formula: str = Field(description="An expression over the columns; metrics by name.")
        missing: Literal["keep", "drop"] = Field(
            "keep", description="Where the formula gives no finite number: keep the reward as it is, or drop the row."
        )

    writes = frozenset({"reward"})

    def __init__(self, config: StageConfig) -> None:
        super().__init__(config)
        self.reads = self.formula.columns | {"reward"}

    def apply(self, table: pa.Table) -> StageOutcome:
        values = self.formula.evaluate(table)
        found = pc.fill_null(pc.is_finite(values), False)
        given = table["reward"].combine_chunks()
        columns = {"reward": pc.if_else(found, values, given)}
        if self.config.missing != "drop" or pc.all(found).as_py():
            return StageOutcome.keep_all(table.num_rows, columns)
        shown = pc.fill_null(pc.cast(values, pa.string()), "null")
        reason = pc.binary_join_element_wise(f"the formula {self.config.formula} gives", shown, " ")
        return StageOutcome(StageOutcome.keep_where(found, reason).reasons, columns)
