"""Base class for stages with a formula argument; `operators.sql.expression` describes the language."""

from __future__ import annotations

from typing import ClassVar

import pyarrow as pa

from operators.base import Operator, StageConfig
from operators.sql.expression import Expression


class FormulaOperator(Operator):
    """A stage that decides or computes by one number per row; a subclass that compares rows sets `rowwise` to False.

    Attributes:
        argument: name of the argument with the formula.
        formula: the parsed formula; the stage reads its columns.
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
