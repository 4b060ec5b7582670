"""Arrays in archives: from segments into columns of Parquet files, and back, byte for byte.

A segment's bytes follow from its values and its Arrow schema: the same batch is written in the same way. The files hold the values once,
beside the rows of their experiences, and the schema in the table `segment`. Archiving tests whether a segment is rebuilt unchanged; if not,
the segment is kept as bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa

# The columns of the table `segment`.
SEGMENT_FIELDS = pa.schema(
    [
        ("segment_id", pa.int64()),
        ("num_rows", pa.int64()),
        ("path", pa.string()),
        ("ipc_schema", pa.binary()),
        ("data", pa.binary()),
    ]
)


_CLASH = "array."


def array_columns(batch: pa.RecordBatch, rows: npt.NDArray[np.int64], taken: Collection[str]) -> pa.Table:
    """Return the arrays of some rows of a segment; one with a name that is taken is renamed."""
    table = pa.Table.from_batches([batch.replace_schema_metadata(None)])
    table = table.rename_columns([_CLASH + name if name in taken else name for name in table.column_names])
    if np.array_equal(rows, np.arange(len(rows))):
        return table.slice(0, len(rows))
    return table.take(pa.array(rows))


def runs_of_segments(segment_ids: npt.NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
    """Yield (segment id, first row, end) of neighbouring rows with the same segment."""
    starts = [0, *(np.flatnonzero(np.diff(segment_ids)) + 1).tolist(), len(segment_ids)]
    for start, end in pairwise(starts):
        if end > start:
            yield int(segment_ids[start]), start, end


def rebuilt(rows: pa.Table, ipc_schema: pa.Schema) -> pa.Buffer:
    """Return the bytes of a segment from the columns of its rows, which are in its order.

    Args:
        ipc_schema: the schema of the segment's record batch.
    """
    names = [_CLASH + name if _CLASH + name in rows.column_names else name for name in ipc_schema.names]
    columns = [_typed(rows.column(name), kind) for name, kind in zip(names, ipc_schema.types, strict=True)]
    batch = pa.RecordBatch.from_arrays(columns, schema=ipc_schema)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def _typed(column: pa.ChunkedArray, kind: pa.DataType) -> pa.Array:
    """Return a list column as one array of exactly this type, with offsets from 0 and no validity where nothing is missing."""
    array = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    values = _alone(array.flatten())
    lengths = array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
    mask = array.is_null() if array.null_count else None
    if values.type != kind.value_type:
        values = values.cast(kind.value_type)
    large = pa.types.is_large_list(kind)
    build = pa.LargeListArray if large else pa.ListArray
    return build.from_arrays(pa.array(offsets if large else offsets.astype(np.int32)), values, type=kind, mask=mask)


def _alone(values: pa.Array) -> pa.Array:
    """Return values in buffers of exactly their length: of a slice, Arrow writes a few bytes more, up to a multiple of 8."""
    if pa.types.is_struct(values.type):
        children = [_alone(child) for child in values.flatten()]
        return pa.StructArray.from_arrays(children, fields=list(values.type))
    if values.null_count:
        return values
    return pa.array(values.to_numpy(zero_copy_only=False).copy(), values.type)


def schema_of(data: bytes) -> pa.Schema:
    """Return a schema from its serialized form."""
    return pa.ipc.read_schema(pa.py_buffer(data))
