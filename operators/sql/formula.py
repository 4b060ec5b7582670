"""What stages share of which one argument is a formula: see `operators.sql.expression` for its language."""

from __future__ import annotations

from typing import ClassVar

import pyarrow as pa

from operators.base import Operator, StageConfig
from operators.sql.expression import Expression


class FormulaOperator(Operator):
    """A stage that decides or computes by one number a row; one that compares rows says that it is not `rowwise`.

    Attributes:
        argument: the one with the formula.
        formula: parsed; what it reads, the stage reads.
    """

    argument: ClassVar[str] = "formula"

    def __init__(self, config: StageConfig) -> None:
        super().__init__(config)
        self.formula = Expression(getattr(config, self.argument), pa.float64())
        self.reads = self.formula.columns
        self.rowwise = self.formula.rowwise

    def validate_schema(self, schema: pa.Schema) -> pa.Schema:
        self.formula.bind(schema)
        return super().validate_schema(schema)

    def close(self) -> None:
        self.formula.close()
