"""The columns of an exported file. A row is a rollout's sequence with everything it belongs to, or a rollout without one.

Rows of a group are adjacent, in the order of rollouts and turns. All arrays are exact: the base columns are typed lists; further
arrays have a name, type and shape, and are bytes (C order, little-endian). In Parquet and in datasets, JSON values are text. In JSON lines
they are JSON, times are ISO 8601, bytes are base64, and floats that JSON lacks are the strings NaN, Infinity and -Infinity.
"""

from __future__ import annotations

import base64
import datetime
import json
import math
import reprlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from rftdata.errors import RftError
from rftdata.segments.codec import Array, named_dtype

_TIME = pa.timestamp("us", tz="UTC")
_LABEL = pa.struct(
    [
        ("old_value", pa.float64()), ("new_value", pa.float64()), ("author", pa.string()), ("session_user_name", pa.string()),
        ("source", pa.string()), ("reason", pa.string()), ("label_batch_id", pa.int64()), ("final", pa.bool_()),
        ("labelled_at", _TIME),
    ]
)  # fmt: skip
_ARRAY = pa.struct(
    [("name", pa.string()), ("dtype", pa.string()), ("shape", pa.list_(pa.int64())), ("data", pa.large_binary())]
)
_SPAN = pa.struct([("start", pa.int32()), ("policy_version_id", pa.int64())])

SCHEMA = pa.schema(
    [
        ("buffer_id", pa.string()), ("run_id", pa.int64()), ("run", pa.string()), ("group_id", pa.int64()),
        ("group_size", pa.int32()), ("baseline", pa.string()), ("explore_step", pa.int32()), ("taskset", pa.string()), ("task_key", pa.string()),
        ("task_payload", pa.string()), ("task_features", pa.string()), ("rollout_index", pa.int32()), ("outcome", pa.string()),
        ("rollout_reward", pa.float64()), ("seconds", pa.float64()), ("error", pa.string()), ("experience_id", pa.int64()),
        ("turn_index", pa.int32()), ("source", pa.string()), ("parent_id", pa.int64()), ("prompt", pa.string()),
        ("response", pa.string()), ("messages", pa.string()), ("reward_sampled", pa.float64()), ("reward", pa.float64()),
        ("reward_final", pa.bool_()), ("reward_parts", pa.string()), ("metrics", pa.string()), ("policy_version_min", pa.int64()),
        ("policy_version_max", pa.int64()), ("policy_step", pa.int32()), ("num_prompt_tokens", pa.int32()),
        ("finish_reason", pa.string()), ("created_at", _TIME), ("labels", pa.list_(_LABEL)), ("earlier", pa.string()),
        ("token_ids", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.uint8())), ("behavior_logprobs", pa.list_(pa.float32())),
        ("policy_spans", pa.list_(_SPAN)), ("arrays", pa.list_(_ARRAY)),
    ]
)  # fmt: skip
JSON_COLUMNS = ("baseline", "task_payload", "task_features", "messages", "reward_parts", "metrics", "earlier")
BASE_ARRAYS: dict[str, Any] = {"token_ids": np.int32, "loss_mask": np.uint8, "behavior_logprobs": np.float32}
# Columns that need a value in every row, and in every row with an experience. The others may be missing or empty.
REQUIRED = (
    "buffer_id", "run_id", "run", "group_id", "group_size", "explore_step", "taskset", "task_key", "task_payload", "task_features",
    "rollout_index", "outcome", "seconds",
)  # fmt: skip
REQUIRED_OF_EXPERIENCE = (
    "turn_index", "source", "prompt", "response", "reward_final", "reward_parts", "metrics", "num_prompt_tokens", "finish_reason",
    "created_at", "labels", "earlier", "token_ids", "loss_mask", "behavior_logprobs", "policy_spans", "arrays",
)  # fmt: skip

Row = dict[str, Any]

# JSON allows these characters in a string, but many programs read them as the end of a line.
_LINE_ENDS = {"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def packed(array: Array, name: str) -> Row:
    """Convert a named array to an element of the column `arrays`."""
    contiguous = np.ascontiguousarray(array)
    return {"name": name, "dtype": array.dtype.name, "shape": list(array.shape), "data": contiguous.tobytes()}


def unpacked(value: Mapping[str, Any]) -> Array:
    """Return the array of an element of the column `arrays`.

    Raises:
        RftError: an unknown type, or bytes that do not fit the shape.
    """
    try:
        dtype = named_dtype(value["dtype"])
        return np.frombuffer(value["data"], dtype=dtype).reshape(value["shape"])
    except (ValueError, TypeError, AttributeError) as error:
        raise RftError(
            f"the array {value.get('name')!r} cannot be read: {error}",
            value=f"{value.get('dtype')}{value.get('shape')}",
            allowed="a numpy or ml_dtypes type, a shape, and as many bytes as they need",
        ) from error


def to_json(row: Row) -> str:
    """Return a row as a line of JSON; its base arrays are numpy arrays, its times datetimes."""
    line: Row = {}
    for name, value in row.items():
        if name in JSON_COLUMNS and value is not None:
            line[name] = json.loads(value)
        elif isinstance(value, np.ndarray):
            line[name] = [_spelled(number) for number in value.tolist()]
        elif name == "labels" and value is not None:
            line[name] = [{key: _spelled(item) for key, item in label.items()} for label in value]
        elif name == "arrays" and value is not None:
            line[name] = [{**array, "data": base64.b64encode(array["data"]).decode()} for array in value]
        else:
            line[name] = _spelled(value)
    text = json.dumps(line, ensure_ascii=False, allow_nan=False)
    for character, escaped in _LINE_ENDS.items():
        text = text.replace(character, escaped)
    return text


def from_json(line: str) -> Row:
    """Return the row of a line of JSON written by `to_json`.

    Raises:
        ValueError: the line is not JSON, or a column cannot hold its value; the message names the column.
    """
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, not {type(row).__name__}")
    for name, value in row.items():
        if value is not None and name in _FROM_JSON:
            try:
                row[name] = _FROM_JSON[name](value)
            except (ValueError, TypeError, OverflowError, KeyError, AttributeError) as error:
                what = f"no {error}" if isinstance(error, KeyError) else error
                raise ValueError(f"the column {name} cannot be {reprlib.repr(value)}: {what}") from error
    return row


def _number_from_json(value: Any) -> Any:
    if isinstance(value, str) and value in _NOT_FINITE:
        return float(value)
    return _of_type((int, float), "a number", value)


def _of_type(types: tuple[type, ...], words: str, value: Any) -> Any:
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise ValueError(f"expected {words}")
    return value


def _labels_from_json(labels: Any) -> Any:
    return [{**label, "labelled_at": datetime.datetime.fromisoformat(label["labelled_at"])} for label in labels]


def _arrays_from_json(arrays: Any) -> Any:
    return [{**array, "data": base64.b64decode(array["data"], validate=True)} for array in arrays]


def _array_from_json(dtype: Any, values: Any) -> Array:
    # float() reads the three spellings; an integer column rejects them.
    return np.array([float(v) for v in values] if dtype is np.float32 else values, dtype=dtype)


def _converters() -> dict[str, Callable[[Any], Any]]:
    """Return a function per column that converts its JSON value."""
    found: dict[str, Callable[[Any], Any]] = {}
    for column in SCHEMA:
        if pa.types.is_string(column.type):
            found[column.name] = partial(_of_type, (str,), "a text")
        elif pa.types.is_integer(column.type):
            found[column.name] = partial(_of_type, (int,), "a whole number")
        elif pa.types.is_floating(column.type):
            found[column.name] = _number_from_json
        elif pa.types.is_boolean(column.type):
            found[column.name] = partial(_of_type, (bool,), "true or false")
    found |= dict.fromkeys(JSON_COLUMNS, partial(json.dumps, ensure_ascii=False))
    found |= {name: partial(_array_from_json, dtype) for name, dtype in BASE_ARRAYS.items()}
    return found | {
        "created_at": datetime.datetime.fromisoformat, "labels": _labels_from_json, "arrays": _arrays_from_json,
    }  # fmt: skip


_NOT_FINITE = ("NaN", "Infinity", "-Infinity")
_FROM_JSON = _converters()


def _spelled(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, datetime.datetime):
        return value.astimezone(datetime.UTC).isoformat()
    return value
