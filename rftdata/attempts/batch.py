"""The batch of a trainer step: its rows and their token arrays, copied into buffers that the caller owns.

`SegmentReader` finds segments by id and gathers rows from memory-mapped record batches. The values are copied once, from the mapped
file into the caller's array. Shapes: B experiences in slot order, T tokens of one experience.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rftdata.errors import PurgedError, QueryError
from rftdata.experience import STEP_REWARD
from rftdata.limits import is_number
from rftdata.segments.codec import SCHEMA, Array, ColumnReader
from rftdata.segments.reader import SegmentReader

ROWS = pa.schema(
    [
        ("slot", pa.int32()),
        ("experience_id", pa.int64()),
        ("pair_id", pa.int64()),
        ("group_id", pa.int64()),
        ("rollout_index", pa.int32()),
        ("turn_index", pa.int32()),
        ("role", pa.string()),
        ("taskset", pa.string()),
        ("reward", pa.float64()),
        ("turn_rewards", pa.list_(pa.float64())),
        ("staleness", pa.int32()),
        ("importance_weight", pa.float64()),
        ("baseline_reward", pa.float64()),
        ("reward_parts", pa.map_(pa.string(), pa.float64())),
        ("num_prompt_tokens", pa.int32()),
        ("num_response_tokens", pa.int32()),
        ("num_trained_tokens", pa.int32()),
    ]
)


class Batch:
    """The experiences drawn for one trainer step.

    Attributes:
        step: the trainer step, from 1.
        rows: one row per experience in slot order, as in `ROWS`: slot, experience_id, pair_id (null unless pairs are drawn; the
            chosen one first, the rejected one right after it), group_id, rollout_index, turn_index, role, taskset, reward (as at the draw, or
            at the run's label cut; null if there is none), turn_rewards (of its turns, if a label changed one of them; null if they are as
            sampled, or there are none), staleness, importance_weight (factor for the experience's loss; 1 unless
            sampling is prioritised), baseline_reward (of the group's greedy rollout; null if it has none), reward_parts (name and value of each, as sampled),
            num_prompt_tokens, num_response_tokens, num_trained_tokens.
        short_reason: why the batch is smaller than requested; None if it is full.
    """

    def __init__(
        self,
        step: int,
        rows: list[dict[str, Any]],
        reader: SegmentReader,
        columns: Sequence[str],
        short_reason: str | None,
    ) -> None:
        self.step = step
        self.short_reason = short_reason
        self.columns = tuple(columns)
        self._reader = reader
        self._places = [(row.pop("segment_id"), row.pop("segment_row")) for row in rows]
        named = [row | {"reward_parts": _numbers(row["reward_parts"])} for row in rows]
        self.rows = pa.Table.from_pylist(named, schema=ROWS)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def num_groups(self) -> int:
        return len(set(self.rows["group_id"].to_pylist()))

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """T of each experience, [B]."""
        return np.asarray(self.rows["num_prompt_tokens"], dtype=np.int64) + np.asarray(
            self.rows["num_response_tokens"], dtype=np.int64
        )

    @property
    def offsets(self) -> npt.NDArray[np.int64]:
        """Start of each experience in a packed column, [B + 1]."""
        return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(self.lengths)])

    def share(self, rank: int, world_size: int) -> Batch:
        """Return the part of one of `world_size` data-parallel ranks: whole groups, with tokens divided as evenly as groups allow.

        Every rank computes the same division: the largest group goes to the rank with the fewest tokens so far (LPT,
        Graham 1969, at most 4/3 of the best). Arrays are read on request, so each rank reads only its own. A rank's share
        may be empty if there are fewer groups than ranks.

        Raises:
            QueryError: the rank does not exist.
        """
        if not 0 <= rank < world_size:
            raise QueryError("the rank does not exist", value=rank, allowed=f"0 to {world_size - 1}")
        tokens: dict[int, int] = {}
        group_ids = self.rows["group_id"].to_pylist()
        for group_id, length in zip(group_ids, self.lengths.tolist(), strict=True):
            tokens[group_id] = tokens.get(group_id, 0) + length
        loads = [0] * world_size
        owner: dict[int, int] = {}
        for group_id, count in sorted(tokens.items(), key=lambda item: -item[1]):
            owner[group_id] = loads.index(min(loads))
            loads[owner[group_id]] += count
        own_places = [place for place, group_id in enumerate(group_ids) if owner[group_id] == rank]
        part = copy.copy(self)
        part.rows = self.rows.take(pa.array(own_places, pa.int64()))
        part._places = [self._places[place] for place in own_places]
        return part

    def has(self, column: str) -> bool:
        """Whether any of the experiences has this array."""
        readers = self._readers(column, needed=False)
        return any(readers[segment_id] is not None for segment_id, _ in self._places)

    def packed(self, column: str, out: Array | None = None) -> Array:
        """Return the values of all experiences one after the other, [sum of T]; written to `out` if given.

        Rows without the array (a further array, not a base column) are zero.
        """
        offsets, lengths = self.offsets, self.lengths
        readers = self._readers(column)
        if out is None:
            out = np.empty(int(offsets[-1]), dtype=_dtype(column, readers))
        ends = offsets.tolist()
        for first, last in self._runs():
            segment_id, row = self._places[first]
            reader = readers[segment_id]
            # Adjacent rows, such as those of a group, are copied together.
            together = reader.together(row, lengths[first:last]) if reader else None
            if together is not None:
                out[ends[first] : ends[last]] = together
                continue
            for i in range(first, last):
                values = self._values(column, i, reader, ends[i + 1] - ends[i])
                out[ends[i] : ends[i + 1]] = 0 if values is None else values
        return out

    def padded(self, column: str, out: Array | None = None, *, fill: float = 0) -> Array:
        """Return the values padded on the right, [B, longest T]; written to `out` ([B, at least longest T]) if given."""
        lengths = self.lengths
        readers = self._readers(column)
        if out is None:
            out = np.empty((len(self), int(lengths.max(initial=0))), dtype=_dtype(column, readers))
        if len(out) < len(self):
            raise QueryError("the memory to pad into has too few rows", value=len(out), allowed=f"at least {len(self)}")
        for i, (padded, (segment_id, _), length) in enumerate(zip(out, self._places, lengths.tolist(), strict=False)):
            values = self._values(column, i, readers[segment_id], length)
            if values is None:
                padded.fill(fill)
            else:
                padded[:length] = values
                padded[length:] = fill
        return out

    def arrays(self, column: str) -> list[Array | None]:
        """Return the array of each experience in its own shape, None if it has none.

        `step_reward` is with the labels that count for the batch. Other arrays are views of the mapped file, not copies: use them within an
        hour, after which bytes of purged rows are overwritten.
        """
        readers = self._readers(column)
        places = ((readers[segment_id], row) for segment_id, row in self._places)
        found = [reader.row(row) if reader else None for reader, row in places]
        if column == STEP_REWARD:
            corrected = self.rows["turn_rewards"].to_pylist()
            found = [
                sampled if rewards is None or sampled is None else np.array(rewards, sampled.dtype)
                for sampled, rewards in zip(found, corrected, strict=True)
            ]
        return found

    def _readers(self, column: str, *, needed: bool = True) -> dict[int, ColumnReader | None]:
        if column not in self.columns:
            raise QueryError(
                "the batch was drawn without this column",
                value=column,
                allowed=", ".join(self.columns),
                todo="name it in draw(columns=…)",
            )
        for i in self._reader.purged(self._places):
            raise PurgedError(
                f"experience {self.rows['experience_id'][i].as_py()} was purged after step {self.step} drew it",
                todo="release the batch with attempt.release(batch) and draw again; `rft lineage` shows who purged it",
            )
        return self._reader.columns(sorted({segment_id for segment_id, _ in self._places}), column, needed=needed)

    def _runs(self) -> Iterator[tuple[int, int]]:
        """Yield the first and last index of adjacent rows of one segment."""
        first = 0
        for i in range(1, len(self._places) + 1):
            segment_id, row = self._places[i - 1]
            if i == len(self._places) or self._places[i] != (segment_id, row + 1):
                yield first, i
                first = i

    def _values(self, column: str, place: int, reader: ColumnReader | None, length: int) -> Array | None:
        """Return one value for each of `length` tokens, or None if the row has no such array."""
        values = reader.flat(self._places[place][1]) if reader else None
        if values is not None and len(values) != length:
            raise QueryError(
                f"the array {column!r} of experience {self.rows['experience_id'][place].as_py()} does not have one value per token",
                value=len(values),
                allowed=str(length),
                todo="read it with batch.arrays",
            )
        return values


def _dtype(column: str, readers: dict[int, ColumnReader | None]) -> np.dtype[Any]:
    if column in SCHEMA.names:
        base: np.dtype[Any] = np.dtype(SCHEMA.field(column).type.value_type.to_pandas_dtype())
        return base
    return next(reader.dtype for reader in readers.values() if reader)


def _numbers(named: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return the numbers of a JSON object, in which PostgreSQL writes 1e16 as an integer, and Arrow converts none that large."""
    return [(name, float(value)) for name, value in named.items() if is_number(value)]
