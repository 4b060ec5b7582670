"""How often a task was used: the columns and features `times_used`, a count, and `usage_frequency`, in [0, 1).

    usage_frequency = n / (n + half)

n is counted in the buffer over all runs: with `of: groups` the groups of rollouts tried on the task, with `of: draws` how often such a
group was drawn for a training step. At n = `half` the frequency is 0.5. The count is taken when the pipeline runs; `rft tasks score`
counts again.

    - usage_frequency: {}
    - usage_frequency: {of: draws, half: 2}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
import pyarrow as pa
from pydantic import Field

from operators.base import Operator, StageConfig, StageOutcome
from operators.task.numbers import as_array, numbers


class UsageFrequency(Operator, revision=1):
    """Adds `times_used` and `usage_frequency`."""

    class Config(StageConfig):
        """What is counted, and the scale."""

        of: Literal["groups", "draws"] = Field(
            "groups",
            description="groups: groups of rollouts tried on the task; draws: how often one was drawn for a training step.",
        )
        half: float = Field(4.0, gt=0, description="The count at which the frequency is 0.5.")

    scores: Mapping[str, pa.DataType] = {"times_used": pa.int64(), "usage_frequency": pa.float64()}
    rowwise = True

    def __init__(self, config: StageConfig) -> None:
        super().__init__(config)
        self._column = f"num_{self.config.of}"
        self.reads = frozenset({self._column})

    def apply(self, table: pa.Table) -> StageOutcome:
        count = np.nan_to_num(numbers(table, self._column))
        columns = {
            "times_used": pa.array(count.astype(np.int64)),
            "usage_frequency": as_array(count / (count + self.config.half)),
        }
        return StageOutcome.keep_all(table.num_rows, columns)
