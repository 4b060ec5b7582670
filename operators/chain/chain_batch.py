"""A batch on its way through a chain: the rows still in it, the decisions on the others, and its current columns.

Most stages read few columns, and texts are most of a batch's bytes. A drop therefore only records which rows stay. A column is cut
when a stage asks for it, so a column that no later stage asks for is never cut.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from operators.base import StageOutcome
from operators.groups import Groups, Ints, Mask
from rftdata.pipeline.records import DECISION_SCHEMA, Question, Verdicts

REWARD = "reward"
"""The column of rewards, and the stage name of the rule that every kept row has a finite reward."""
DEFAULT_PRIORITY = 0.0


@dataclass
class _Column:
    """Values of the rows that remained after `num_cuts` drops."""

    values: pa.Array
    num_cuts: int


@dataclass
class _Drop:
    position: Ints
    stage: str
    reasons: pa.Array


@dataclass
class ChainBatch:
    """The rows of `original` that are still in the chain, in order.

    Attributes:
        original: the batch as it arrived; never changed.
        position: index in `original` of each remaining row.
        verdicts: what stages return besides decisions.
        changed: names of columns that have new values.
    """

    original: pa.Table
    position: Ints = field(init=False)
    verdicts: Verdicts = field(default_factory=Verdicts)

    def __post_init__(self) -> None:
        self.position = np.arange(self.original.num_rows)
        self._columns = {name: _Column(_array(self.original[name]), 0) for name in self.original.column_names}
        self.changed: set[str] = set()
        self._cuts = [self.position]
        self._drops: list[_Drop] = []
        self._indices: dict[int, pa.Array] = {}

    @property
    def num_rows(self) -> int:
        return len(self.position)

    @cached_property
    def groups(self) -> Groups:
        """The groups of all rows of the batch, including dropped ones."""
        return Groups.of(self.original)

    def column(self, name: str) -> pa.Array:
        """Return the column's values for the remaining rows."""
        column = self._columns[name]
        if column.num_cuts < len(self._cuts) - 1:
            column.values = column.values.take(self._index(column.num_cuts))
            column.num_cuts = len(self._cuts) - 1
        return column.values

    def _index(self, num_cuts: int) -> pa.Array:
        """Return the places of the remaining rows among those that remained after `num_cuts` cuts."""
        if num_cuts not in self._indices:
            rows = self.position if num_cuts == 0 else np.searchsorted(self._cuts[num_cuts], self.position)
            self._indices[num_cuts] = pa.array(rows)
        return self._indices[num_cuts]

    def table(self, names: Iterable[str] | None = None) -> pa.Table:
        """Return the remaining rows with some or all columns."""
        wanted = self._columns if names is None else set(names)
        columns = {name: self.column(name) for name in list(self._columns) if name in wanted}
        return pa.table(columns)

    def set(self, name: str, values: pa.Array) -> None:
        """Set a column's values for the remaining rows."""
        self.changed.add(name)
        self._columns[name] = _Column(_array(values), len(self._cuts) - 1)

    def drop(self, reasons: pa.Array | None, stage: str) -> int:
        """Drop the rows that have a reason; return their number."""
        if reasons is None or reasons.null_count == len(reasons):
            return 0
        reasons = _array(reasons)
        dropped = reasons.is_valid().to_numpy(zero_copy_only=False)
        self._drops.append(_Drop(self.position[dropped], stage, pc.cast(reasons.drop_null(), pa.string())))
        self._keep(~dropped)
        return len(self._drops[-1].position)

    def set_aside(self, outcome: StageOutcome, stage: str) -> Mask | None:
        """Remove the groups that a person is asked about. They are decided later, from the first stage on.

        Returns:
            which of the rows remain; None if no person is asked.
        """
        if not outcome.waiting:
            return None
        ids, groups = (self.column(name).to_numpy() for name in ("experience_id", "group_id"))
        self.verdicts.questions += [
            Question(int(ids[row]), int(groups[row]), stage, review) for row, review in sorted(outcome.waiting.items())
        ]
        stays = ~np.isin(groups, [groups[row] for row in outcome.waiting])
        self._keep(stays)
        return stays

    def _keep(self, mask: Mask) -> None:
        self.position = self.position[mask]
        self._cuts.append(self.position)
        self._indices.clear()

    def dropped(self) -> tuple[pa.Array, pa.Array]:
        """Return, for every row of the batch, the stage that dropped it and the reason; null where none did."""
        num_rows = self.original.num_rows
        if not self._drops:
            return pa.nulls(num_rows, pa.string()), pa.nulls(num_rows, pa.string())
        which, place = np.full(num_rows, -1), np.full(num_rows, -1)
        before = 0
        for number, drop in enumerate(self._drops):
            which[drop.position] = number
            place[drop.position] = np.arange(before, before + len(drop.position))
            before += len(drop.position)
        stages = pa.array([drop.stage for drop in self._drops])
        reasons = pa.concat_arrays([drop.reasons for drop in self._drops])
        alive = which < 0
        return stages.take(pa.array(which, mask=alive)), reasons.take(pa.array(place, mask=alive))

    def decisions(self) -> pa.Table:
        """Return one decision per row of the batch, without the groups that a person is asked about."""
        table, num_rows, position = self.original, self.original.num_rows, self.position
        kept = np.zeros(num_rows, bool)
        kept[position] = True
        stages, reasons = self.dropped()
        priority = table["priority"].combine_chunks().to_numpy(zero_copy_only=False).astype(float)
        if "priority" in self.changed:
            priority[position] = self.column("priority").to_numpy(zero_copy_only=False)
        decisions = pa.table(
            [
                table["experience_id"].cast(pa.int64()),
                table["group_id"].cast(pa.int64()),
                pa.array(kept),
                stages,
                reasons,
                self._changed_rewards(),
                pa.array(np.nan_to_num(priority, nan=DEFAULT_PRIORITY, posinf=None, neginf=None)),
            ],
            schema=DECISION_SCHEMA,
        )
        waiting = pa.array(sorted({row.group_id for row in self.verdicts.questions}), pa.int64())
        return decisions.filter(pc.invert(pc.is_in(table["group_id"], waiting))) if len(waiting) else decisions

    def _changed_rewards(self) -> pa.Array:
        """Return the reward of each kept row that some stage changed; null for all others."""
        if REWARD not in self.changed:
            return pa.nulls(self.original.num_rows, pa.float64())
        num_rows, after = self.original.num_rows, self.column(REWARD)
        before = self.original[REWARD].combine_chunks().take(pa.array(self.position))
        # Null-safe comparison: a reward that a stage filled in counts as changed; NaN that stayed NaN does not.
        same = pc.fill_null(pc.equal(before, after), False)
        same = pc.or_(same, pc.and_(pc.is_null(before, nan_is_null=True), pc.is_null(after, nan_is_null=True)))
        values, changed = np.zeros(num_rows), np.zeros(num_rows, np.bool_)
        changed[self.position] = ~same.to_numpy(zero_copy_only=False)
        values[self.position] = pc.fill_null(after, 0.0).to_numpy(zero_copy_only=False)
        return pa.array(values, pa.float64(), mask=~changed)


def _array(values: pa.Array | pa.ChunkedArray) -> pa.Array:
    if not isinstance(values, pa.ChunkedArray):
        return values
    return values.chunk(0) if values.num_chunks == 1 else values.combine_chunks()
