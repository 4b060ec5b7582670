"""Keep a sample of the rows, always the same ones.

    - sample: {fraction: 0.1}
    - sample: {max_rows: 4, per: group}
    - sample: {max_groups: 16, per: taskset, seed: 7}

A hash of their ids and the seed selects the rows, not a random number. A selected group is selected again in a replay, on another
machine, and in a larger sample with the same seed. `fraction` decides on each group (or row) independently: of a million groups a tenth
stays, of a batch of ten between none and a few. The two limits apply within each batch.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field, model_validator

from operators.base import Operator, StageConfig, StageOutcome
from operators.groups import Groups, Ints, Mask, fewest_first, hashed


class Sample(Operator, revision=1):
    """Drops groups (or rows) beyond a share or a number; the chain's `min_group_size` applies in addition."""

    class Config(StageConfig):
        """One of `fraction`, `max_groups` and `max_rows`."""

        fraction: float | None = Field(None, gt=0, lt=1, description="Share of the groups (or rows) that stays.")
        max_groups: int | None = Field(
            None, ge=1, description="Largest number of groups that stay, per batch or per taskset in it."
        )
        max_rows: int | None = Field(
            None, ge=1, description="Largest number of rows that stay, per batch or per taskset or group in it."
        )
        per: Literal["batch", "taskset", "group"] = Field("batch", description="Where the two limits apply.")
        of: Literal["groups", "rows"] = Field(
            "groups", description="Whether `fraction` selects whole groups or single rows."
        )
        seed: int = Field(0, ge=0, description="Another seed gives another sample.")

        @model_validator(mode="after")
        def _one_of(self) -> Sample.Config:
            limits = [name for name in ("fraction", "max_groups", "max_rows") if getattr(self, name) is not None]
            if len(limits) != 1:
                raise ValueError(f"give one of fraction, max_groups and max_rows, not {' and '.join(limits) or 'none'}")
            if self.max_groups is not None and self.per == "group":
                raise ValueError("max_groups counts groups of a batch or of a taskset, not of a group")
            return self

    def __init__(self, config: StageConfig) -> None:
        super().__init__(config)
        self.reads = frozenset({"experience_id", "group_id"} | ({"taskset"} if self.config.per == "taskset" else set()))

    def apply(self, table: pa.Table) -> StageOutcome:
        by_row = self.config.max_rows is not None or (self.config.fraction is not None and self.config.of == "rows")
        keys = hashed(table["experience_id" if by_row else "group_id"].to_numpy(), self.config.seed)
        if self.config.fraction is not None:
            kept = keys < np.uint64(int(self.config.fraction * 2**64))
            return _keep(kept, f"not in the sample of {self.config.fraction:g} of the {'rows' if by_row else 'groups'}")
        limit = self.config.max_rows if by_row else self.config.max_groups
        reason = f"beyond the first {limit} {'rows' if by_row else 'groups'} of the {self.config.per}, in the order of the sample"
        return _keep(self._within(table, keys, by_row) < limit, reason)

    def _within(self, table: pa.Table, keys: npt.NDArray[np.uint64], by_row: bool) -> Ints:
        """Return the rank of each row, or of its group, in the order of the sample within its batch, taskset or group."""
        sets = {"batch": _nothing, "taskset": _tasksets, "group": _groups}[self.config.per](table)
        if by_row:
            return fewest_first(keys, sets)
        group_N = Groups.of(table).group_N
        _, first, group_N = np.unique(group_N, return_index=True, return_inverse=True)
        return fewest_first(keys[first], sets[first])[group_N]


def _nothing(table: pa.Table) -> Ints:
    return np.zeros(table.num_rows, np.int64)


def _groups(table: pa.Table) -> Ints:
    return Groups.of(table).group_N


def _tasksets(table: pa.Table) -> Ints:
    codes = table["taskset"].combine_chunks().dictionary_encode().indices
    numbers: Ints = pc.fill_null(codes, -1).to_numpy().astype(np.int64)
    return numbers


def _keep(kept: Mask, reason: str) -> StageOutcome:
    return StageOutcome.keep_where(pa.array(kept), reason)
