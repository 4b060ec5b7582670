"""The array columns of an experience, as one Arrow record batch per segment.

T = prompt and response tokens of one experience. Every segment has the base columns:

| column | Arrow type | meaning |
| --- | --- | --- |
| token_ids | list<int32> | T; prompt and response |
| loss_mask | list<uint8> | T; 1 where the token was sampled and trains, else 0 (bytes: readable without unpacking bits) |
| behavior_logprobs | list<float32> | T; log-probability (nats) under the policy that sampled it; 0 on the prompt, NaN if no policy sampled it |
| policy_spans | list<struct<start: int32, policy_version_id: int64>> | the policy that sampled from token `start` on |

and one column per further array of its experiences (teacher log-probabilities, token rewards, routed experts, images…), of any
numpy or ml_dtypes type and shape: the values of a row as a list in C order, null where a row has none. The field's metadata holds
`dtype`, and `shape` if all rows have one shape apart from their first dimension; otherwise a companion column `NAME.shape`
(list<int64>) holds the shapes. Encoding and reading cost a few numpy calls per row and column.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rftdata.errors import RftError
from rftdata.experience import Sequence as Experience

Array = npt.NDArray[Any]

SCHEMA = pa.schema(
    [
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.uint8()), nullable=False),
        pa.field("behavior_logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field(
            "policy_spans",
            pa.list_(pa.struct([("start", pa.int32()), ("policy_version_id", pa.int64())])),
            nullable=False,
        ),
    ]
)
SHAPE_SUFFIX = ".shape"
_PURGED = b"purged_rows"
_LIST_LIMIT = 2**31 - 1
# Types that Arrow lacks are stored as unsigned integers of their width; the field's metadata names the type.
_CARRIERS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def encode(experiences: Sequence[Experience]) -> pa.RecordBatch:
    """Return the record batch of a segment, one row per experience.

    Raises:
        RftError: arrays of one name have different types, or a type that cannot be stored.
    """
    lengths = np.array([len(e.token_ids) for e in experiences], np.int64)
    prompts = np.array([e.num_prompt_tokens for e in experiences], np.int64)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    token_ids, loss_mask, logprobs = (
        _tokens(experiences),
        _masks(experiences, lengths, prompts),
        _logprobs(experiences, lengths, prompts),
    )
    columns = [_list(offsets, pa.array(flat)) for flat in (token_ids, loss_mask, logprobs)] + [_spans(experiences)]
    fields = list(SCHEMA)
    for field, column in _further(experiences):
        fields.append(field)
        columns.append(column)
    return pa.record_batch(
        columns, schema=pa.schema([f.with_type(c.type) for f, c in zip(fields, columns, strict=True)])
    )


def check_further_arrays(experiences: Sequence[Experience]) -> None:
    """Refuse experiences whose further arrays `encode` would refuse.

    Raises:
        RftError: as `encode`.
    """
    for _ in _further(experiences):
        pass


def _further(experiences: Sequence[Experience]) -> Iterable[tuple[pa.Field, pa.Array]]:
    for name in sorted({name for e in experiences for name in e.arrays}):
        yield from _extra(name, [e.arrays.get(name) for e in experiences])


def _tokens(experiences: Sequence[Experience]) -> Array:
    tokens = [e.token_ids if _is_int32(e.token_ids) else _integers(e.token_ids) for e in experiences]
    return np.concatenate([np.empty(0, np.int32), *tokens], dtype=np.int32, casting="unsafe")


def _masks(experiences: Sequence[Experience], lengths: Array, prompts: Array) -> Array:
    """Return 0 on the prompt, and 1 or the given mask on the response."""
    flat = np.repeat(
        np.tile(np.array([0, 1], np.uint8), len(lengths)), np.stack([prompts, lengths - prompts], 1).reshape(-1)
    )
    end = 0
    for e, length, prompt in zip(experiences, lengths, prompts, strict=True):
        if e.loss_mask is not None:
            flat[end + prompt : end + length] = e.loss_mask
        end += length
    return flat


def _logprobs(experiences: Sequence[Experience], lengths: Array, prompts: Array) -> Array:
    """Return 0 on the prompt, and the given values or NaN on the response."""
    nothing = np.zeros(int(prompts.max(initial=0)), np.float32)
    unknown = np.full(int((lengths - prompts).max(initial=0)), np.nan, np.float32)
    pieces: list[Any] = [nothing[:0]]
    for e in experiences:
        pieces.append(nothing[: e.num_prompt_tokens])
        logprobs = e.behavior_logprobs
        pieces.append(unknown[: len(e.token_ids) - e.num_prompt_tokens] if logprobs is None else logprobs)
    return np.concatenate(pieces, dtype=np.float32, casting="unsafe")


def _is_int32(values: Any) -> bool:
    return isinstance(values, np.ndarray) and values.dtype == np.int32


def _integers(values: Any) -> Array:
    try:
        array = np.asarray(values)
        if array.size and (array.dtype.kind not in "iu" or array.min() < -(2**31) or array.max() >= 2**31):
            raise ValueError(f"a {array.dtype} array from {array.min()} to {array.max()}")
    except (ValueError, OverflowError, TypeError) as error:
        raise RftError("token_ids must be 32-bit integers", value=str(error)) from error
    return array


def _list(offsets: npt.NDArray[np.int64], values: pa.Array, missing: npt.NDArray[np.bool_] | None = None) -> pa.Array:
    mask = None if missing is None or not missing.any() else pa.array(missing)
    if offsets[-1] > _LIST_LIMIT:
        return pa.LargeListArray.from_arrays(pa.array(offsets), values, mask=mask)
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), values, mask=mask)


def _spans(experiences: Sequence[Experience]) -> pa.Array:
    offsets = np.concatenate([[0], np.cumsum([len(e.policy_spans) for e in experiences])]).astype(np.int64)
    flat = [span for e in experiences for span in e.policy_spans]
    starts = pa.array([start for start, _ in flat], pa.int32())
    versions = pa.array([version for _, version in flat], pa.int64())
    return _list(offsets, pa.StructArray.from_arrays([starts, versions], names=["start", "policy_version_id"]))


def _extra(name: str, values: Sequence[Any]) -> Iterable[tuple[pa.Field, pa.Array]]:
    if name in SCHEMA.names or name.endswith(SHAPE_SUFFIX) or not name:
        raise RftError(
            "an array cannot have this name",
            value=name,
            allowed=f"any except {', '.join(SCHEMA.names)} and *{SHAPE_SUFFIX}",
        )
    arrays = [None if value is None else np.asarray(value) for value in values]
    present = [array for array in arrays if array is not None]
    dtypes = {array.dtype for array in present}
    if len(dtypes) > 1:
        raise RftError(
            f"arrays named {name!r} of one write have different types",
            value=", ".join(sorted(map(str, dtypes))),
            todo="convert them to one type",
        )
    dtype = present[0].dtype
    sizes = [0 if array is None else array.size for array in arrays]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])
    flat = np.concatenate([array.reshape(-1) for array in present])
    inner = {array.shape[1:] for array in present if array.ndim}
    regular = len(inner) == 1 and all(array.ndim and 0 not in array.shape[1:] for array in present)
    metadata = {"dtype": dtype.name} | ({"shape": json.dumps([-1, *next(iter(inner))])} if regular else {})
    missing = np.array([array is None for array in arrays])
    yield pa.field(name, pa.null(), metadata=metadata), _list(offsets, _carried(flat, name), missing)
    if not regular:
        shapes = [None if array is None else list(array.shape) for array in arrays]
        yield pa.field(name + SHAPE_SUFFIX, pa.null()), pa.array(shapes, pa.list_(pa.int64()))


def _carried(flat: Array, name: str) -> pa.Array:
    """Return values as an Arrow array without a copy, as unsigned integers if Arrow lacks the type."""
    if flat.dtype == np.bool_:
        return pa.array(flat.view(np.uint8))
    if flat.dtype.kind in "iuf" and flat.dtype.isnative and flat.dtype.name != "float128":
        return pa.array(flat)
    if flat.dtype.itemsize in _CARRIERS and flat.dtype.kind == "V" and flat.dtype.names is None:  # ml_dtypes
        return pa.array(flat.view(_CARRIERS[flat.dtype.itemsize]))
    raise RftError(
        f"arrays named {name!r} have a type that cannot be stored",
        value=str(flat.dtype),
        allowed="bool, integers, floats of up to 64 bits, and the types of ml_dtypes",
    )


def emptied(batch: pa.RecordBatch, rows: Iterable[int]) -> pa.RecordBatch:
    """Return the batch with some rows emptied: empty base columns, no further arrays, and their numbers in the metadata."""
    gone = sorted(purged_rows(batch) | set(rows))
    mask = np.zeros(batch.num_rows, np.bool_)
    mask[gone] = True
    columns = []
    for field in batch.schema:
        nothing = pa.scalar([] if field.name in SCHEMA.names else None, field.type)
        # Copies the other rows, so that no purged values are left in the buffers.
        columns.append(pc.if_else(pa.array(mask), nothing, batch.column(field.name)))
    metadata = {**(batch.schema.metadata or {}), _PURGED: json.dumps(gone).encode()}
    return pa.record_batch(columns, schema=batch.schema.with_metadata(metadata))


def purged_rows(batch: pa.RecordBatch) -> frozenset[int]:
    """Return the rows whose values were purged."""
    return frozenset(json.loads((batch.schema.metadata or {}).get(_PURGED, b"[]")))


class ColumnReader:
    """One column of a mapped record batch, read as views of single rows without copying.

    Attributes:
        dtype: numpy type of the values.
    """

    def __init__(self, batch: pa.RecordBatch, name: str) -> None:
        field, column = batch.schema.field(name), batch.column(name)
        metadata: Mapping[bytes, bytes] = field.metadata or {}
        self._offsets: list[int] = column.offsets.to_pylist()
        values = column.values.to_numpy(zero_copy_only=True)
        wanted = metadata.get(b"dtype")
        self._values: Array = values if wanted is None else values.view(named_dtype(wanted.decode()))
        self.dtype = self._values.dtype
        self._missing = None if column.null_count == 0 else column.is_null().to_numpy(zero_copy_only=False)
        self._inner = json.loads(metadata[b"shape"]) if b"shape" in metadata else [-1]
        self._shapes = batch.column(name + SHAPE_SUFFIX) if name + SHAPE_SUFFIX in batch.schema.names else None

    def row(self, index: int) -> Array | None:
        """Return the array of a row in its own shape, or None if it has none; read-only memory of the file."""
        flat = self.flat(index)
        if flat is None:
            return None
        return flat.reshape(self._inner if self._shapes is None else self._shapes[index].as_py())

    def together(self, index: int, lengths: npt.NDArray[np.int64]) -> Array | None:
        """Return the concatenated values of rows from `index` on; None if their lengths differ from these, or a row has no array."""
        ends = self._offsets[index : index + len(lengths) + 1]
        if self._missing is not None or not np.array_equal(np.diff(ends), lengths):
            return None
        return self._values[ends[0] : ends[-1]]

    def flat(self, index: int) -> Array | None:
        """Return the values of a row in C order."""
        if self._missing is not None and self._missing[index]:
            return None
        return self._values[self._offsets[index] : self._offsets[index + 1]]


def named_dtype(name: str) -> np.dtype[Any]:
    try:
        return np.dtype(name)
    except TypeError:
        pass
    try:
        import ml_dtypes
    except ImportError as error:
        raise RftError(
            "an array has a type that numpy lacks", value=name, todo="install ml_dtypes to read it"
        ) from error
    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return dtype
