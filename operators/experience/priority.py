"""Compute the priority by which `sampling.order: prioritized` (and `rank`) draws.

    - priority: {formula: "abs(reward - avg(reward) OVER (PARTITION BY group_id))"}
    - priority: {formula: "1 - metrics.confidence", missing: 0.5}

The formula is an [expression](#expressions). A group is drawn by the greatest priority of its rows.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from operators.base import StageConfig, StageOutcome
from operators.sql.formula import FormulaOperator


class Priority(FormulaOperator, revision=1):
    """Sets `priority` to the formula's value, or to `missing` if that is null, NaN or infinite."""

    class Config(StageConfig):
        """The formula, and the value to use without one."""

        formula: str = Field(description="An expression over the columns; metrics by name.")
        missing: float = Field(
            0.0, allow_inf_nan=False, description="The priority if the formula gives no finite number."
        )

    writes = frozenset({"priority"})

    def apply(self, table: pa.Table) -> StageOutcome:
        values = self.formula.evaluate(table)
        is_number = pc.fill_null(pc.is_finite(values), False)
        return StageOutcome.keep_all(table.num_rows, {"priority": pc.if_else(is_number, values, self.config.missing)})
