"""Add computed columns to each row: tags for later stages, and for queries on `rft.score`.

    - tag:
        columns:
          is_long: num_response_tokens > 512
          kind: metadata.kind
          gain: reward - reward_sampled

Values are [expressions](#expressions). A tag drops nothing; `threshold` and `sql` decide on it. Tags are stored, and computed again
where a column that they read has changed.
"""

from __future__ import annotations

import pyarrow as pa
from pydantic import Field

from operators.base import BATCH_SCHEMA, Operator, StageConfig, StageOutcome
from operators.sql.expression import Expression
from rftdata.errors import ConfigError


class Tag(Operator, revision=1):
    """Adds one column per expression: numbers, texts or truth values; null where the expression is null."""

    class Config(StageConfig):
        """The columns to add."""

        columns: dict[str, str] = Field(
            min_length=1, description="Name of the new column -> expression on the columns of the row."
        )

    rowwise = True

    def __init__(self, config: StageConfig) -> None:
        super().__init__(config)
        taken = sorted(set(self.config.columns) & set(BATCH_SCHEMA.names))
        if taken:
            raise ConfigError(f"{taken[0]!r} is a column of every batch", todo="give the tag another name")
        self._expressions = {name: Expression(text) for name, text in self.config.columns.items()}
        for name, expression in self._expressions.items():
            if not expression.rowwise:
                raise ConfigError(
                    f"{name!r} reads other rows than its own, so it cannot be stored",
                    value=expression.text,
                    todo="use `sql`, `pass_rate` or `priority` for what depends on the group",
                )
        self.reads = frozenset().union(*(expression.columns for expression in self._expressions.values()))
        self.scores = dict.fromkeys(self._expressions, pa.null())

    def validate_schema(self, schema: pa.Schema) -> pa.Schema:
        self.scores = {name: _storable(name, expression.bind(schema)) for name, expression in self._expressions.items()}
        return super().validate_schema(schema)

    def apply(self, table: pa.Table) -> StageOutcome:
        columns = {name: expression.evaluate(table) for name, expression in self._expressions.items()}
        return StageOutcome.keep_all(table.num_rows, columns)

    def close(self) -> None:
        for expression in self._expressions.values():
            expression.close()


def _storable(name: str, kind: pa.DataType) -> pa.DataType:
    kinds = pa.types
    if kinds.is_uint64(kind):  # hash() returns it, and half of its values are too large for int64
        return kind
    if kinds.is_integer(kind):
        return pa.int64()
    if kinds.is_floating(kind):
        return pa.float64()
    if kinds.is_boolean(kind) or kinds.is_string(kind):
        return kind
    raise ConfigError(f"the tag {name!r} is neither a number nor a text nor true or false", value=str(kind))
