"""One number per row for everything that a stage sees of it: the same number means the same answer.

Stored scores carry it, so that a corrected answer, a changed reward or a removed sibling is detected without a list of what may
change. The numbers are stored, so they must not depend on the machine, the process or the version of a package.

Identity columns are left out. They are fixed for an experience, and a copy of it in another run has different ones.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from numpy.typing import NDArray

from operators.base import IDENTITY_COLUMNS

Digests = NDArray[np.uint64]

_NULL = np.uint64(0x9AE16A3B2F90404F)
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFT = np.uint64(31)


def input_digests(table: pa.Table, *, rowwise: bool, more_input: str = "", group_column: str = "group_id") -> pa.Array:
    """Return one 64-bit integer per row for the values of its columns.

    Args:
        table: what the stage receives.
        rowwise: whether a row's answer depends on that row alone; else the digest covers all rows of its group, in their order.
        more_input: what else the answer depends on.
        group_column: equal values in this column form a group.
    """
    rows_N = np.full(table.num_rows, _text(more_input), np.uint64)
    for name in sorted(set(table.column_names) - IDENTITY_COLUMNS):
        column = table[name].combine_chunks()
        rows_N = _mixed(rows_N ^ _text(name))
        rows_N = _mixed(rows_N ^ _column(column))
    if not rowwise and table.num_rows:
        groups = pc.rank(table[group_column].combine_chunks(), tiebreaker="dense").to_numpy().astype(np.int64)
        rows_N = _with_siblings(rows_N, groups)
    return pa.array(rows_N.view(np.int64))


def _with_siblings(rows_N: Digests, group_N: NDArray[np.int64]) -> Digests:
    """Combine each row's digest with those of all rows of its group, in the order of the table."""
    order = np.argsort(group_N, kind="stable")
    sorted_N = group_N[order]
    starts = np.flatnonzero(np.r_[True, sorted_N[1:] != sorted_N[:-1]])
    lengths = np.diff(np.r_[starts, len(order)])
    place_N = np.arange(len(order)) - np.repeat(starts, lengths)
    # A sum of digests mixed with their places: vectorised, and sensitive to the order.
    placed_N = _mixed(rows_N[order] ^ _mixed(place_N.astype(np.uint64) + np.uint64(1)))
    sums_G: Digests = np.add.reduceat(placed_N, starts)
    group_G = _mixed(sums_G ^ lengths.astype(np.uint64))
    digests = np.empty_like(rows_N)
    digests[order] = _mixed(np.repeat(group_G, lengths) ^ placed_N)
    return digests


def _mixed(values: Digests) -> Digests:
    """Mix so that every bit of the result depends on every bit of the value (the finaliser of SplitMix64)."""
    values = (values ^ (values >> np.uint64(30))) * _MULTIPLIERS[0]
    values = (values ^ (values >> np.uint64(27))) * _MULTIPLIERS[1]
    return values ^ (values >> _SHIFT)


def _text(text: str) -> np.uint64:
    return np.uint64(xxhash.xxh3_64_intdigest(text.encode()))


def _column(column: pa.Array) -> Digests:
    kind = column.type
    if pa.types.is_null(kind):
        return np.full(len(column), _NULL)
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind):
        # Cast to one width, so that a column that a query turned into INTEGER has the same digest as the BIGINT it was.
        values = pc.cast(pc.fill_null(column, False if pa.types.is_boolean(kind) else 0), pa.int64(), safe=False)
        digests = _mixed(values.to_numpy(zero_copy_only=False).view(np.uint64))
    elif pa.types.is_floating(kind):
        values = pc.fill_null(pc.cast(column, pa.float64()), 0.0).to_numpy(zero_copy_only=False) + 0.0  # no -0.0
        digests = _mixed(np.where(np.isnan(values), np.nan, values).view(np.uint64))
    elif pa.types.is_string(kind) or pa.types.is_binary(kind):
        digests = _of_bytes(column)
    else:
        digests = np.fromiter((_text(repr(value)) for value in column.to_pylist()), np.uint64, len(column))
    if column.null_count:
        digests = np.where(column.is_null().to_numpy(zero_copy_only=False), _NULL, digests)
    return digests


def _of_bytes(column: pa.Array) -> Digests:
    """Digest texts in their Arrow buffer, without decoding or copying."""
    _, offsets, data = column.buffers()
    places = np.frombuffer(offsets, np.int32)[column.offset : column.offset + len(column) + 1].tolist()
    content = memoryview(data) if data is not None else memoryview(b"")
    digest: Callable[[memoryview], int] = xxhash.xxh3_64_intdigest
    return np.fromiter((digest(content[a:b]) for a, b in pairwise(places)), np.uint64, len(column))
