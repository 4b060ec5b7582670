"""What all members of a transfer know before its first byte: the group, which rank sends which rows of which tensor, and where they lie.

Tensors travel in buckets, and a bucket as one message of every rank of the trainer that holds rows of it. Buckets and messages follow from the
tensor list, the type on the wire and the bucket size alone, so they need not be sent.

A message begins with one 64-bit hash per piece (consecutive rows of one tensor), zeros up to a whole block of 1024 bytes, then the pieces.
A piece lies in its blocks as it lies in those of its tensor: one that begins at byte 1500 of the tensor begins at byte 476 of a block. So the hashes of all
pieces of a tensor add up to that of the tensor (`hashes.py`), and a message that holds whole tensors is a bucket as the engine needs it.

Importing this module does not import torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import xxhash

from rftdata.errors import RftError

BLOCK_BYTES = 1024
HASH_BYTES = 8
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

TensorShapes = tuple[tuple[str, tuple[int, ...]], ...]
"""Name and shape of every tensor that an engine gets."""
AdaptersConfig = dict[str, Any]
"""The contents of peft's adapter_config.json."""
ADAPTERS_DTYPE = "float32"
"""Type of adapters on the wire, as in files; engines cast them to their own."""


class TransferError(RftError):
    """Weights that did not arrive as they were sent.

    Attributes:
        is_half_applied: whether some of them have been loaded.
    """

    is_half_applied = False


@dataclass(frozen=True)
class Part:
    """Consecutive rows (of the first dimension) of a tensor, and the rank of the trainer that sends them."""

    sender: int
    first_row: int
    num_rows: int


@dataclass(frozen=True)
class WireTensor:
    """One tensor of a transfer.

    Attributes:
        parts: in the order of their rows; they are all rows, each once. Empty for a tied tensor.
        same_as: name of an earlier tensor with the same values, which travels in its place; None for a tensor that travels itself.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    same_as: str | None = None

    @property
    def num_rows(self) -> int:
        return self.shape[0] if self.shape else 1


Typed = tuple[WireTensor, str]
"""A tensor and its type on the wire."""


@dataclass(frozen=True)
class Piece:
    """The place of a part in a message.

    Attributes:
        slot: index of its tensor in the bucket.
        first_row, num_rows: see `Part`.
        offset: byte of the tensor at which it begins.
        start: byte of the message at which it begins.
        num_bytes: without padding.
    """

    slot: int
    first_row: int
    num_rows: int
    offset: int
    start: int
    num_bytes: int

    @property
    def num_blocks(self) -> int:
        return num_blocks(self.offset, self.num_bytes)


@dataclass(frozen=True)
class Message:
    """What one rank of the trainer sends of a bucket; the first `data_start` bytes hold the hashes."""

    sender: int
    pieces: tuple[Piece, ...]
    num_bytes: int

    @property
    def data_start(self) -> int:
        return _whole_blocks(HASH_BYTES * len(self.pieces))


@dataclass(frozen=True)
class Slot:
    """The place of a whole tensor in a bucket; `start` and `num_bytes` without padding."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    start: int
    num_bytes: int


@dataclass(frozen=True)
class Bucket:
    """Tensors that travel together.

    Attributes:
        messages: by ascending rank of their senders, which is the order in which they are sent.
        num_bytes: of the tensors, each padded to whole blocks.
    """

    slots: tuple[Slot, ...]
    messages: tuple[Message, ...]
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class TransferPlan:
    """One transfer, as one member sees it. Picklable: an engine hands it to its worker processes.

    Attributes:
        transfer_id: which transfer; sent first, so that members of different transfers cannot meet unnoticed.
        group_id: the group; a member that is in another one leaves that and joins this.
        backend: gloo or nccl.
        host, port: of the store at which the group meets.
        num_ranks: size of the group; the first ranks are those of the trainer.
        first_rank: rank of the engine's first process; 0 in the trainer.
        tensors: what is sent.
        dtype: type of the tensors on the wire.
        in_float32: those that travel in float32 nevertheless, because an engine keeps them so; in the order of `tensors`.
        bucket_bytes: size up to which tensors are packed together. A larger tensor has its own bucket.
        timeout_s: longest wait for any one message, or for a member to join.
        adapters: peft's configuration, if the tensors are adapters; None for whole weights.
    """

    transfer_id: int
    group_id: int
    backend: str
    host: str
    port: int
    num_ranks: int
    first_rank: int
    tensors: tuple[WireTensor, ...]
    dtype: str
    bucket_bytes: int
    timeout_s: float
    adapters: AdaptersConfig | None = None
    in_float32: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors on the wire, without hashes and padding."""
        return sum(slot.num_bytes for bucket in self.buckets() for slot in bucket.slots)

    @property
    def shapes(self) -> TensorShapes:
        """What an engine gets, tied tensors under each of their names."""
        return shapes_of(self.tensors)

    @property
    def tied_names(self) -> dict[str, list[str]]:
        """The other names of each tensor that travels for tied ones."""
        found: dict[str, list[str]] = {}
        for tensor in self.tensors:
            if tensor.same_as is not None:
                found.setdefault(tensor.same_as, []).append(tensor.name)
        return found

    def buckets(self) -> tuple[Bucket, ...]:
        """Return the buckets in the order in which they are sent."""
        return _buckets(self.tensors, self.dtype, self.in_float32, self.bucket_bytes)

    def refuse_other_type(self, dtype: str, in_float32: Collection[str] = ()) -> None:
        """Refuse weights in another type than that of the engine, and adapters in another than theirs; nothing has been received then.

        Args:
            in_float32: tensors that the engine keeps in float32 although its type is another.

        Raises:
            RftError: the types differ, or tensors that the engine keeps in float32 are rounded.
        """
        dtype = dtype if self.adapters is None else ADAPTERS_DTYPE
        if self.dtype != dtype:
            raise RftError(
                f"transfer {self.transfer_id} sends weights in a type that is not the engine's",
                value=self.dtype,
                allowed=dtype,
                todo="give all explorers of the run the same explorer.engine_args.dtype",
            )
        sent = {tensor.name for tensor in self.tensors if tensor.same_as is None}
        if rounded := sorted(sent.intersection(in_float32).difference(self.in_float32)):
            raise RftError(
                f"transfer {self.transfer_id} rounds tensors that the engine keeps in float32",
                value=", ".join(rounded[:3]),
                todo="start the trainer again; if it happens again, set sync.method: memory",
            )


def num_blocks(offset: int, num_bytes: int) -> int:
    """Return how many blocks of a tensor its bytes from `offset` touch."""
    return -(-(offset % BLOCK_BYTES + num_bytes) // BLOCK_BYTES)


def shapes_of(tensors: Sequence[WireTensor]) -> TensorShapes:
    """Return names and shapes."""
    return tuple((tensor.name, tensor.shape) for tensor in tensors)


def to_json(tensors: Sequence[WireTensor]) -> list[dict[str, Any]]:
    """Return the elements of `rft.weight_transfer.tensors`."""
    return [
        {"name": tensor.name, "shape": list(tensor.shape)}
        | (
            {"same_as": tensor.same_as}
            if tensor.same_as
            else {"parts": [[p.sender, p.first_row, p.num_rows] for p in tensor.parts]}
        )
        for tensor in tensors
    ]


def from_json(entries: Sequence[dict[str, Any]]) -> tuple[WireTensor, ...]:
    """The reverse of `to_json`."""
    return tuple(
        WireTensor(
            entry["name"],
            tuple(entry["shape"]),
            tuple(Part(*part) for part in entry.get("parts", ())),
            entry.get("same_as"),
        )
        for entry in entries
    )


@lru_cache(maxsize=4)
def fingerprint(tensors: tuple[WireTensor, ...]) -> str:
    """Return xxh3_64 of a tensor list, 16 hex digits."""
    return xxhash.xxh3_64_hexdigest(json.dumps(to_json(tensors)).encode())


def checksum_of_hashes(hashes: Sequence[int]) -> str:
    """Return one checksum for all tensors, 16 hex digits."""
    return xxhash.xxh3_64_hexdigest(b"".join(value.to_bytes(HASH_BYTES, "little", signed=True) for value in hashes))


@lru_cache(maxsize=4)
def _buckets(
    tensors: tuple[WireTensor, ...], dtype: str, in_float32: tuple[str, ...], bucket_bytes: int
) -> tuple[Bucket, ...]:
    wide = frozenset(in_float32)
    travelling = [(tensor, "float32" if tensor.name in wide else dtype) for tensor in tensors if tensor.same_as is None]
    return tuple(_bucket(members) for members in _divided(travelling, bucket_bytes))


def _divided(tensors: Sequence[Typed], bucket_bytes: int) -> Iterator[list[Typed]]:
    """Yield the tensors of one bucket at a time."""
    found: list[Typed] = []
    total = 0
    for tensor, dtype in tensors:
        padded = _whole_blocks(math.prod(tensor.shape) * _ITEM_BYTES[dtype])
        if found and total + padded > bucket_bytes:
            yield found
            found, total = [], 0
        found.append((tensor, dtype))
        total += padded
    if found:
        yield found


def _bucket(tensors: Sequence[Typed]) -> Bucket:
    slots: list[Slot] = []
    parts: dict[int, list[tuple[int, Part]]] = {}
    end = 0
    for index, (tensor, dtype) in enumerate(tensors):
        num_bytes = math.prod(tensor.shape) * _ITEM_BYTES[dtype]
        slots.append(Slot(tensor.name, tensor.shape, dtype, end, num_bytes))
        end += _whole_blocks(num_bytes)
        for part in tensor.parts:
            parts.setdefault(part.sender, []).append((index, part))
    messages = tuple(_message(sender, slots, parts[sender]) for sender in sorted(parts))
    return Bucket(tuple(slots), messages, end)


def _message(sender: int, slots: Sequence[Slot], parts: Sequence[tuple[int, Part]]) -> Message:
    end = _whole_blocks(HASH_BYTES * len(parts))
    pieces: list[Piece] = []
    for index, part in parts:
        slot = slots[index]
        row_bytes = slot.num_bytes // max(1, slot.shape[0] if slot.shape else 1)
        offset, num_bytes = part.first_row * row_bytes, part.num_rows * row_bytes
        start = end + offset % BLOCK_BYTES
        pieces.append(Piece(index, part.first_row, part.num_rows, offset, start, num_bytes))
        end += BLOCK_BYTES * num_blocks(offset, num_bytes)
    return Message(sender, tuple(pieces), end)


def _whole_blocks(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES
