"""What a trainer draws: rows of a step and their token arrays, scattered into buffers that the caller owns.

`SegmentReader` finds segments by id and gathers rows from memory-mapped record batches; the values go from the mapped
file into the caller's array in one copy. Shapes: B experiences in slot order, T tokens of one experience.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rftdata.errors import QueryError, SegmentCorruptError
from rftdata.segments import SCHEMA, SegmentAddress, SegmentStore

if TYPE_CHECKING:
    from rftdata.database import Database

Array = npt.NDArray[Any]
ROWS = pa.schema(
    [
        ("slot", pa.int32()), ("experience_id", pa.int64()), ("group_id", pa.int64()), ("rollout_index", pa.int32()),
        ("turn_index", pa.int32()), ("reward", pa.float64()), ("staleness", pa.int32()), ("num_prompt_tokens", pa.int32()),
        ("num_response_tokens", pa.int32()),
    ]
)  # fmt: skip
_DTYPES: dict[str, Any] = {"token_ids": np.int32, "loss_mask": np.uint8, "behavior_logprobs": np.float32}


class SegmentReader:
    """Reads rows of segments; addresses of segments are looked up once, since a segment's content never changes."""

    def __init__(self, database: Database, store: SegmentStore) -> None:
        self._database = database
        self._store = store
        self._batches: dict[int, pa.RecordBatch] = {}
        self._lock = threading.Lock()

    def batches(self, segment_ids: Sequence[int]) -> dict[int, pa.RecordBatch]:
        """Record batches by segment id.

        Raises:
            SegmentCorruptError: a segment is unknown or cannot be served.
        """
        with self._lock:
            wanted = sorted(set(segment_ids) - set(self._batches))
            if wanted:
                rows = self._database.fetch("segment_addresses", segment_ids=wanted)
                if len(self._batches) > 4096:
                    self._batches.clear()
                    wanted = sorted(set(segment_ids))
                    rows = self._database.fetch("segment_addresses", segment_ids=wanted)
                for row in rows:
                    self._batches[row["segment_id"]] = self._store.read(SegmentAddress(**row), verify=True)
            try:
                return {i: self._batches[i] for i in segment_ids}
            except KeyError as error:
                raise SegmentCorruptError(
                    f"segment {error} is not in rft.segment", todo="`rft doctor` lists every affected experience"
                ) from error

    def take(self, places: Sequence[tuple[int, int]], columns: Sequence[str]) -> pa.Table:
        """Rows at (segment id, row) places, in that order, as list columns."""
        unknown = [column for column in columns if column not in SCHEMA.names]
        if unknown:
            raise QueryError("no such array", value=unknown[0], allowed=", ".join(SCHEMA.names))
        batches = self.batches([segment_id for segment_id, _ in places])
        arrays = {}
        for column in columns:
            pieces = [batches[segment_id].column(column).slice(row, 1) for segment_id, row in places]
            arrays[column] = pa.chunked_array(pieces, type=SCHEMA.field(column).type).combine_chunks()
        return pa.table(arrays) if columns else pa.table({})

    def slices(self, places: Sequence[tuple[int, int]], column: str) -> Iterator[Array]:
        """Views of the mapped values of one column, one per place."""
        batches = self.batches([segment_id for segment_id, _ in places])
        flat: dict[int, tuple[Array, Array]] = {}
        for segment_id, row in places:
            if segment_id not in flat:
                array = batches[segment_id].column(column)
                flat[segment_id] = (array.offsets.to_numpy(), array.values.to_numpy())
            offsets, values = flat[segment_id]
            yield values[offsets[row] : offsets[row + 1]]

    def all_addresses(self) -> Iterator[tuple[SegmentAddress, int]]:
        """Every segment with the number of rows it should have."""
        for row in self._database.fetch("all_segments"):
            num_rows = row.pop("num_rows")
            yield SegmentAddress(**row), num_rows


class Batch:
    """The experiences drawn for one trainer step.

    Attributes:
        step: the trainer step, from 1.
        rows: one row per experience in slot order, as in `ROWS`: slot, experience_id, group_id, rollout_index, turn_index,
            reward (as it stood when drawn; null where none), staleness, num_prompt_tokens, num_response_tokens.
        short_reason: why the batch holds fewer groups than asked for; None when it is full.
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
        self.rows = pa.Table.from_pylist(rows, schema=ROWS)

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
        """Where each experience begins in a packed column, [B + 1]."""
        return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(self.lengths)])

    def packed(self, column: str, out: Array | None = None) -> Array:
        """Values of all experiences one after the other, [sum of T]; written to `out` when given."""
        self._check(column)
        offsets = self.offsets
        if out is None:
            out = np.empty(int(offsets[-1]), dtype=_DTYPES[column])
        for i, values in enumerate(self._reader.slices(self._places, column)):
            out[offsets[i] : offsets[i + 1]] = values
        return out

    def padded(self, column: str, out: Array | None = None, *, fill: float = 0) -> Array:
        """Values padded on the right, [B, longest T]; written to `out` ([B, at least that]) when given."""
        self._check(column)
        lengths = self.lengths
        if out is None:
            out = np.empty((len(self), int(lengths.max(initial=0))), dtype=_DTYPES[column])
        for i, values in enumerate(self._reader.slices(self._places, column)):
            out[i, : len(values)] = values
            out[i, len(values) :] = fill
        return out

    def _check(self, column: str) -> None:
        if column not in self.columns:
            raise QueryError(
                "the batch was drawn without this column",
                value=column,
                allowed=", ".join(self.columns),
                todo="name it in draw(columns=…)",
            )
