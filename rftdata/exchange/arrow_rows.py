"""Rows of record batches, column by column: `pyarrow.Array.to_pylist` makes an object per value first and takes several times as long."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from rftdata.exchange.columns import BASE_ARRAYS, Row

Values = list[Any]
_EMPTY: Values = []


def rows_of(columns: dict[str, pa.Array], num_rows: int, names: list[str]) -> Iterator[Row]:
    """Yield rows with these names. Base arrays are numpy arrays; missing columns and NULL are None.

    What Python or numpy lacks stays recognisable for the check of the row: times of other years are numbers, base arrays with NULL among
    their elements are lists.
    """
    nothing: Values = [None] * num_rows
    values = [
        nothing if name not in columns else _arrays(columns[name]) if name in BASE_ARRAYS else _values(columns[name])
        for name in names
    ]
    for row in zip(*values, strict=True):
        yield dict(zip(names, row, strict=True))


def _values(column: pa.Array) -> Values:
    if column.null_count == len(column):
        return [None] * len(column)
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_boolean(kind):
        return _of_numpy(column)
    if pa.types.is_timestamp(kind):
        micros = _of_numpy(column.fill_null(0).cast(pa.int64()))
        times = (np.array(micros, "datetime64[us]")).tolist()  # numbers where Python has no such year
        return _with_nulls(
            column, [t.replace(tzinfo=datetime.UTC) if isinstance(t, datetime.datetime) else t for t in times]
        )
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return _with_nulls(column, _of_numpy(column.fill_null(0)))
    if pa.types.is_list(kind):
        return _lists(column)
    if pa.types.is_struct(kind):
        fields = {field.name: _values(column.field(i)) for i, field in enumerate(kind)}
        elements = zip(*fields.values(), strict=True)
        return _with_nulls(column, [dict(zip(fields, element, strict=True)) for element in elements])
    values: Values = column.to_pylist()
    return values


def _of_numpy(column: pa.Array) -> Values:
    values: Values = column.to_numpy(zero_copy_only=False).tolist()
    return values


def _with_nulls(column: pa.Array, values: Values) -> Values:
    if column.null_count:
        for place in np.flatnonzero(_of_numpy(column.is_null())):
            values[place] = None
    return values


def _lists(column: pa.Array) -> Values:
    elements = _values(column.flatten())
    lengths = _of_numpy(column.value_lengths().fill_null(0))
    ends = np.cumsum([0, *lengths]).tolist()
    # Most lists are empty (labels, further arrays), and one object for all of them keeps the garbage collector from running.
    return _with_nulls(column, [elements[start:end] if end > start else _EMPTY for start, end in pairwise(ends)])


def _arrays(column: pa.Array) -> Values:
    """Return a list column as one array per row; a row with NULL among its elements is a list."""
    if column.flatten().null_count:
        dtype = column.type.value_type.to_pandas_dtype()
        return [None if row is None else row if None in row else np.array(row, dtype) for row in column.to_pylist()]
    offsets, values = column.offsets.to_numpy().tolist(), column.values.to_numpy(zero_copy_only=False)
    return _with_nulls(column, [values[start:end] for start, end in pairwise(offsets)])
