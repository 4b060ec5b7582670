"""The columns of an exported file. A row is a rollout's sequence with everything it belongs to, or a rollout without one.

Rows of a group are adjacent, in the order of rollouts and of the first turn of each row. All arrays are exact: the base columns are typed lists; further
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
from functools import cache, partial
from typing import Any

import numpy as np
import pyarrow as pa

from rftdata.errors import RftError
from rftdata.segments.codec import Array, named_dtype

_TIME = pa.timestamp("us", tz="UTC")
_LABEL = pa.struct(
    [
        ("turn", pa.int32()),
        ("old_value", pa.float64()),
        ("new_value", pa.float64()),
        ("author", pa.string()),
        ("session_user_name", pa.string()),
        ("source", pa.string()),
        ("reason", pa.string()),
        ("label_batch_id", pa.int64()),
        ("final", pa.bool_()),
        ("labelled_at", _TIME),
    ]
)
_ARRAY = pa.struct(
    [("name", pa.string()), ("dtype", pa.string()), ("shape", pa.list_(pa.int64())), ("data", pa.large_binary())]
)
_SPAN = pa.struct([("start", pa.int32()), ("policy_version_id", pa.int64())])

SCHEMA = pa.schema(
    [
        ("buffer_id", pa.string()),
        ("run_id", pa.int64()),
        ("run", pa.string()),
        ("group_id", pa.int64()),
        ("group_size", pa.int32()),
        ("baseline", pa.string()),
        ("explore_step", pa.int32()),
        ("taskset", pa.string()),
        ("task_key", pa.string()),
        ("task_payload", pa.string()),
        ("task_features", pa.string()),
        ("rollout_index", pa.int32()),
        ("outcome", pa.string()),
        ("rollout_reward", pa.float64()),
        ("seconds", pa.float64()),
        ("error", pa.string()),
        ("stop_reason", pa.string()),
        ("tries", pa.string()),
        ("experience_id", pa.int64()),
        ("turn_index", pa.int32()),
        ("source", pa.string()),
        ("parent_id", pa.int64()),
        ("prompt", pa.string()),
        ("response", pa.string()),
        ("messages", pa.string()),
        ("reward_sampled", pa.float64()),
        ("reward", pa.float64()),
        ("reward_final", pa.bool_()),
        ("turn_rewards", pa.list_(pa.float64())),
        ("reward_parts", pa.string()),
        ("metrics", pa.string()),
        ("policy_version_min", pa.int64()),
        ("policy_version_max", pa.int64()),
        ("policy_step", pa.int32()),
        ("num_prompt_tokens", pa.int32()),
        ("fork", pa.string()),
        ("role", pa.string()),
        ("finish_reason", pa.string()),
        ("created_at", _TIME),
        ("labels", pa.list_(_LABEL)),
        ("annotations", pa.string()),
        ("comments", pa.string()),
        ("edit", pa.string()),
        ("earlier", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.uint8())),
        ("behavior_logprobs", pa.list_(pa.float32())),
        ("policy_spans", pa.list_(_SPAN)),
        ("arrays", pa.list_(_ARRAY)),
    ]
)
JSON_COLUMNS = (
    "baseline",
    "tries",
    "task_payload",
    "task_features",
    "messages",
    "reward_parts",
    "metrics",
    "annotations",
    "comments",
    "edit",
    "earlier",
)
BASE_ARRAYS: dict[str, Any] = {"token_ids": np.int32, "loss_mask": np.uint8, "behavior_logprobs": np.float32}
# Columns that need a value in every row, and in every row with an experience. The others may be missing or empty.
REQUIRED = (
    "buffer_id",
    "run_id",
    "run",
    "group_id",
    "group_size",
    "explore_step",
    "taskset",
    "task_key",
    "task_payload",
    "task_features",
    "rollout_index",
    "outcome",
    "seconds",
)
REQUIRED_OF_EXPERIENCE = (
    "turn_index",
    "source",
    "prompt",
    "response",
    "reward_final",
    "reward_parts",
    "metrics",
    "num_prompt_tokens",
    "finish_reason",
    "created_at",
    "labels",
    "earlier",
    "token_ids",
    "loss_mask",
    "behavior_logprobs",
    "policy_spans",
    "arrays",
)

Row = dict[str, Any]

# JSON allows these characters in a string, but many programs read them as the end of a line.
_LINE_ENDS = {"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def packed(array: Array, name: str) -> Row:
    """Convert a named array to an element of the column `arrays`."""
    contiguous = np.ascontiguousarray(array)
    return {"name": name, "dtype": _type_name(array.dtype), "shape": array.shape, "data": contiguous.tobytes()}


@cache
def _type_name(dtype: np.dtype[Any]) -> str:
    """Return the name of a type. numpy takes longer to make it than to copy the values of a turn."""
    return dtype.name


def unpacked(value: Mapping[str, Any]) -> Array:
    """Return the array of an element of the column `arrays`.

    Raises:
        RftError: an unknown type, or bytes that do not fit the shape.
    """
    try:
        if min(value["shape"], default=0) < 0:  # numpy would choose this dimension itself
            raise ValueError("its shape is negative")
        dtype = named_dtype(value["dtype"])
        return np.frombuffer(value["data"], dtype=dtype).reshape(value["shape"])
    except (ValueError, TypeError, AttributeError, SyntaxError) as error:
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
    """Return the row of a line of JSON written by `to_json`, with values of the types in `SCHEMA`.

    Raises:
        ValueError: the line is not JSON, or a column cannot hold its value; the message names the column.
    """
    try:
        row = json.loads(line)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, not {type(row).__name__}")
    for name, value in row.items():
        if value is not None and name in _FROM_JSON:
            try:
                row[name] = _FROM_JSON[name](value)
            except (ValueError, TypeError, ArithmeticError, RecursionError) as error:
                raise ValueError(f"the column {name} cannot be {reprlib.repr(value)}: {error}") from error
    return row


def _text_from_json(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("expected a text")
    return value


def _truth_from_json(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("expected true or false")
    return value


def _integer_from_json(kind: pa.DataType, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError("expected a whole number")
    if not -(2 ** (kind.bit_width - 1)) <= value < 2 ** (kind.bit_width - 1):
        raise ValueError(f"it is out of range for {kind.bit_width} bits")
    return value


def _number_from_json(value: Any) -> float:
    if isinstance(value, str) and value in _NOT_FINITE:
        return float(value)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError("expected a number")
    return float(value)  # OverflowError for integers beyond all floats


def _time_from_json(value: Any) -> datetime.datetime:
    time = datetime.datetime.fromisoformat(_text_from_json(value))
    if time.tzinfo is None:
        raise ValueError("it has no time zone")
    return time.astimezone(datetime.UTC)


def _bytes_from_json(value: Any) -> bytes:
    return base64.b64decode(_text_from_json(value), validate=True)


def _list_from_json(convert: Callable[[Any], Any], value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError("expected a list")
    return [None if element is None else convert(element) for element in value]


def _struct_from_json(fields: Mapping[str, Callable[[Any], Any]], value: Any) -> Row:
    if not isinstance(value, dict):
        raise ValueError("expected an object")
    unknown = sorted(value.keys() - fields.keys())
    if unknown:
        raise ValueError(f"unknown key {reprlib.repr(unknown[0])}, known are {', '.join(fields)}")
    struct: Row = dict.fromkeys(fields)
    for name, item in value.items():
        if item is not None:
            try:
                struct[name] = fields[name](item)
            except (ValueError, TypeError, ArithmeticError) as error:
                raise ValueError(f"{name} cannot be {reprlib.repr(item)}: {error}") from error
    return struct


def _array_from_json(dtype: Any, value: Any) -> Array:
    if not isinstance(value, list):
        raise ValueError("expected a list")
    if dtype is np.float32:
        with np.errstate(over="raise"):
            numbers = value if set(map(type, value)) <= {float, int} else [_number_from_json(item) for item in value]
            return np.array(numbers, dtype=np.float32)
    if not set(map(type, value)) <= {int}:
        raise ValueError("expected whole numbers")
    return np.array(value, dtype=dtype)  # OverflowError for numbers out of range


def _converter(kind: pa.DataType) -> Callable[[Any], Any]:
    """Return a function that converts a JSON value to a type of `SCHEMA`."""
    if pa.types.is_struct(kind):
        return partial(_struct_from_json, {field.name: _converter(field.type) for field in kind})
    if pa.types.is_list(kind):
        return partial(_list_from_json, _converter(kind.value_type))
    if pa.types.is_integer(kind):
        return partial(_integer_from_json, kind)
    return {
        pa.string(): _text_from_json,
        pa.bool_(): _truth_from_json,
        pa.float64(): _number_from_json,
        _TIME: _time_from_json,
        pa.large_binary(): _bytes_from_json,
    }[kind]


_NOT_FINITE = ("NaN", "Infinity", "-Infinity")
_FROM_JSON: dict[str, Callable[[Any], Any]] = {
    **{column.name: _converter(column.type) for column in SCHEMA if column.name not in BASE_ARRAYS},
    **dict.fromkeys(JSON_COLUMNS, partial(json.dumps, ensure_ascii=False)),
    **{name: partial(_array_from_json, dtype) for name, dtype in BASE_ARRAYS.items()},
}


def _spelled(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, datetime.datetime):
        return value.astimezone(datetime.UTC).isoformat()
    return value
