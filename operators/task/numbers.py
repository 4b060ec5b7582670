"""Numbers of tasks by name: a column of the batch, else a key of the task's features, else of its metadata."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rftdata.errors import OperatorError

JSON_COLUMNS = ("features", "metadata")


def columns_for(names: Iterable[str], schema: pa.Schema) -> frozenset[str]:
    """Return the columns that `numbers` reads for these names."""
    columns = frozenset(name for name in names if name in schema.names)
    return columns if columns.issuperset(names) else columns | {name for name in JSON_COLUMNS if name in schema.names}


def keys_for(names: Iterable[str], schema: pa.Schema) -> frozenset[str]:
    """Return the names that `numbers` must find among features and metadata."""
    return frozenset(names) - frozenset(schema.names)


def numbers(table: pa.Table, name: str) -> NDArray[np.float64]:
    """Return a number per row, NaN where a task has none.

    Raises:
        OperatorError: no task of the batch has it, or a value is not a number.
    """
    if name in table.column_names:
        return _floats(table[name].to_pylist(), name)
    keys: set[str] = set()
    for column in JSON_COLUMNS:
        if column not in table.column_names:
            continue
        parsed = [json.loads(text) if text else {} for text in table[column].to_pylist()]
        if any(isinstance(row, dict) and name in row for row in parsed):
            return _floats([row.get(name) if isinstance(row, dict) else None for row in parsed], name)
        keys.update(key for row in parsed[:100] if isinstance(row, dict) for key in row)
    raise OperatorError(
        f"no task has the number {name!r}, neither as a column nor among its features or metadata",
        allowed=", ".join(sorted({*keys, *table.column_names})),
        todo="correct the name, or put the stage that computes it before this one",
    )


def _floats(values: list[object], name: str) -> NDArray[np.float64]:
    out = np.full(len(values), np.nan)
    for i, value in enumerate(values):
        if value is None:
            continue
        try:
            out[i] = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            raise OperatorError(f"{name!r} is not a number in every task", value=value) from error
    out[~np.isfinite(out)] = math.nan
    return out


def place_in_range(values: NDArray[np.float64], low: float, high: float) -> NDArray[np.float64]:
    """Map `low` to 0 and `high` (which may be the smaller one) to 1, clipped beyond; NaN stays NaN."""
    return np.clip((values - low) / (high - low), 0.0, 1.0)


def as_array(values: NDArray[np.float64]) -> pa.Array:
    """Convert to doubles with null for NaN."""
    return pa.array(values, pa.float64(), from_pandas=True)
