"""Arrays of many experiences as list columns, read from their segments without a step per row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rftdata.errors import SegmentCorruptError
from rftdata.segments.codec import SCHEMA, named_dtype, purged_rows
from rftdata.segments.reader import SegmentReader

# Arrays of every experience, and arrays that some workflows and algorithms record.
BASE_ARRAYS = {name: SCHEMA.field(name).type for name in ("token_ids", "loss_mask", "behavior_logprobs")}
OPTIONAL_ARRAYS = {
    "token_rewards": pa.list_(pa.float32()),
    "teacher_logprobs": pa.list_(pa.float32()),
    "step_reward": pa.list_(pa.float32()),
    "state_hash": pa.list_(pa.int64()),
    "turns": pa.list_(pa.int32()),
}
# Columns with the place and the length of an experience's arrays.
PLACE = ("segment_id", "segment_row", "num_prompt_tokens", "num_response_tokens")
# Tokens whose arrays are in memory together.
_TOKENS_AT_ONCE = 2**21

OnDamage = Callable[[SegmentCorruptError], None]


class ArrayColumns:
    """Adds arrays to batches of experiences.

    Args:
        on_damage: called once for each segment that cannot be served, whose experiences are left out; None to raise the error.
    """

    def __init__(self, reader: SegmentReader, on_damage: OnDamage | None) -> None:
        self._reader = reader
        self._on_damage = on_damage
        self._reported: set[int] = set()

    def add(self, rows: pa.RecordBatch, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the rows, which have the columns `PLACE`, with the named arrays; NULL if a row has none or was purged.

        Raises:
            SegmentCorruptError: a segment cannot be served; names its experiences.
        """
        for part in parts(rows):
            batches, damaged = self._reader.intact(np.unique(part["segment_id"].to_numpy()).tolist())
            intact = self._without(part, damaged)
            for column in columns:
                kind = BASE_ARRAYS.get(column) or OPTIONAL_ARRAYS[column]
                intact = intact.append_column(column, _column(intact, batches, column, kind))
            yield intact

    def _without(self, rows: pa.RecordBatch, damaged: Sequence[SegmentCorruptError]) -> pa.RecordBatch:
        if not damaged:
            return rows
        if self._on_damage is None:
            raise damaged[0]
        for error in damaged:
            if error.segment_id not in self._reported:
                self._reported.add(error.segment_id)
                self._on_damage(error)
        gone = np.isin(rows["segment_id"].to_numpy(), [error.segment_id for error in damaged])
        return rows.filter(pa.array(~gone))


def parts(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield the rows, which have the columns `PLACE`, by as many tokens as are in memory together."""
    tokens = rows["num_prompt_tokens"].to_numpy() + rows["num_response_tokens"].to_numpy()
    number = np.cumsum(tokens) // _TOKENS_AT_ONCE
    starts = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), rows.num_rows]
    for start, end in pairwise(starts):
        if end > start:
            yield rows.slice(start, end - start)


def _column(rows: pa.RecordBatch, batches: Mapping[int, pa.RecordBatch], column: str, kind: pa.ListType) -> pa.Array:
    segment_ids, places = rows["segment_id"].to_numpy(), rows["segment_row"].to_numpy()
    order = np.argsort(segment_ids, kind="stable")
    sorted_ids, sorted_places = segment_ids[order], places[order]
    starts = [0, *(np.flatnonzero(np.diff(sorted_ids)) + 1).tolist(), len(order)]
    pieces = [
        _piece(batches[int(sorted_ids[start])], column, sorted_places[start:end], kind)
        for start, end in pairwise(starts)
        if end > start
    ]
    if not pieces:
        return pa.array([], kind)
    together = pieces[0] if len(pieces) == 1 else pa.concat_arrays(pieces)
    if np.array_equal(order, np.arange(len(order))):
        return together
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return together.take(pa.array(back))


def _piece(batch: pa.RecordBatch, column: str, places: npt.NDArray[np.int64], kind: pa.ListType) -> pa.Array:
    """Return one column of rows of a segment."""
    if column not in batch.schema.names:
        return pa.nulls(len(places), kind)
    stored, gone = batch.column(column), purged_rows(batch)
    if not gone and np.array_equal(places, np.arange(places[0], places[0] + len(places))):
        values = stored.slice(int(places[0]), len(places))
    else:
        missing = np.isin(places, list(gone)) if gone else None
        values = stored.take(pa.array(places, mask=missing))
    return typed(values, batch.schema.field(column), kind)


def typed(values: pa.Array, field: pa.Field, kind: pa.ListType) -> pa.Array:
    """Return stored lists with the element type of a query; `field` is theirs in the segment."""
    dtype = (field.metadata or {}).get(b"dtype")
    if dtype is not None and named_dtype(dtype.decode()).kind == "V":  # a type that Arrow lacks, stored as integers
        values = _decoded(values, dtype.decode(), kind)
    return values if values.type == kind else values.cast(kind, safe=False)


def _decoded(array: pa.Array, dtype: str, kind: pa.ListType) -> pa.Array:
    values = array.flatten().to_numpy(zero_copy_only=False).view(named_dtype(dtype))
    lengths = np.nan_to_num(array.value_lengths().to_numpy(zero_copy_only=False)).astype(np.int32)
    offsets = np.concatenate([np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32)])
    flat = pa.array(values.astype(kind.value_type.to_pandas_dtype()))
    mask = array.is_null() if array.null_count else None
    return pa.ListArray.from_arrays(pa.array(offsets), flat, mask=mask)
