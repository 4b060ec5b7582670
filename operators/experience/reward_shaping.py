"""Compute the reward by a formula on the columns of the row.

    - reward_shaping: {formula: "reward + 0.1 * metrics.quality - 0.05 * (num_response_tokens > 512)::INT"}
    - reward_shaping: {formula: "reward * coalesce(metrics.confidence, 1)"}
    - reward_shaping: {formula: "reward / metrics.num_turns", missing: drop}

The formula is an [expression](#expressions). It is null where a value it needs is missing, and not finite where it divides by zero;
`missing` decides what happens to the row then. To add a term only where it exists, write `coalesce(…, 0)`.
"""

from __future__ import annotations

from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from operators.base import StageConfig, StageOutcome
from operators.sql.formula import FormulaOperator


class RewardShaping(FormulaOperator, revision=1):
    """Sets `reward` to the formula's value. The verifier's reward stays in `reward_sampled`; final labels are not changed."""

    class Config(StageConfig):
        """The formula, and what happens if it has no finite value."""

        formula: str = Field(description="An expression over the columns; metrics by name.")
        missing: Literal["keep", "drop"] = Field(
            "keep", description="If the formula gives no finite number: keep the reward, or drop the row."
        )

    writes = frozenset({"reward"})

    def __init__(self, config: StageConfig) -> None:
        super().__init__(config)
        self.reads = self.formula.columns | {"reward"}

    def apply(self, table: pa.Table) -> StageOutcome:
        values = self.formula.evaluate(table)
        is_number = pc.fill_null(pc.is_finite(values), False)
        before = table["reward"].combine_chunks()
        columns = {"reward": pc.if_else(is_number, values, before)}
        if self.config.missing != "drop" or pc.all(is_number).as_py():
            return StageOutcome.keep_all(table.num_rows, columns)
        value = pc.fill_null(pc.cast(values, pa.string()), "null")
        reason = pc.binary_join_element_wise(f"the formula {self.config.formula} gives", value, " ")
        return StageOutcome(StageOutcome.keep_where(is_number, reason).reasons, columns)
