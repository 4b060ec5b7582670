"""Compute the share of correct rollouts of each group, as columns for later stages and in `rft.score`.

    - pass_rate: {}
    - pass_rate: {column: metrics.accuracy, correct_above: 0.5}
    - threshold: {column: pass_rate, max: 0.9}

    num_correct = |{i : value_i > correct_above}|,  pass_rate = num_correct / |{i : value_i is known}|

over the rollouts of the group that are still in the chain. A rollout of several rows counts once, with their mean.
A corrected reward, or a rollout dropped earlier, changes the value for the whole group.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from pydantic import Field

from operators.base import StageConfig, StageOutcome
from operators.groups import Correct, Groups
from operators.sql.formula import FormulaOperator
from rftdata.errors import ConfigError


class PassRate(FormulaOperator, revision=1):
    """Scores `pass_rate` (0 to 1) and `num_correct`; both are null in a group in which no rollout has a value."""

    class Config(StageConfig):
        """What counts as correct."""

        column: str = Field("reward", description="The value to decide by: a column, a metric or an expression.")
        correct_above: float = Field(0.0, description="A rollout is correct if its value is greater.")

    argument = "column"

    def __init__(self, config: StageConfig) -> None:
        super().__init__(config)
        if not self.formula.rowwise:
            raise ConfigError(
                "the formula reads other rows than its own, so its results cannot be stored",
                value=self.formula.text,
                allowed="an expression over the columns of one row",
                todo="compare with a number, or use `sql` or `priority`",
            )
        self.scores = {"pass_rate": pa.float64(), "num_correct": pa.int64()}
        self.reads = self.formula.columns | {"group_id", "rollout_index", "role"}
        self.rowwise = False

    def apply(self, table: pa.Table) -> StageOutcome:
        groups = Groups.by_role(table)
        correct = Correct.of(groups, self.formula.evaluate(table), self.config.correct_above)
        unknown_N = (correct.num_known_G == 0)[groups.group_N]
        rate_G = correct.num_correct_G / np.maximum(correct.num_known_G, 1)
        columns = {
            "pass_rate": pa.array(rate_G[groups.group_N], mask=unknown_N),
            "num_correct": pa.array(correct.num_correct_G[groups.group_N], pa.int64(), mask=unknown_N),
        }
        return StageOutcome.keep_all(table.num_rows, columns)
