"""Plan of a transfer, which all members know before its first byte: the group, which rank sends which rows of which tensor, and where they lie.

Tensors travel in buckets, and a bucket as one message of every rank of the trainer that holds rows of it. Buckets and messages follow from the
tensor list, the type on the wire and the bucket size alone, so they need not be sent.

A message begins with one 64-bit hash per piece (consecutive rows of one tensor), zeros up to a whole block of 1024 bytes, then the pieces.
A piece lies in its blocks as it lies in those of its tensor: one that begins at byte 1500 of the tensor begins at byte 476 of a block. So the hashes of all
pieces of a tensor add up to that of the tensor (`hashes.py`), and a message that holds whole tensors is a bucket as the engine needs it.

Importing this module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import xxhash

from rftcore.sync.tensors import AdaptersConfig, Part, TensorShapes, WireTensor, shapes_of
from rftdata.errors import RftError

BLOCK_BYTES = 1024
HASH_BYTES = 8
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

ADAPTERS_DTYPE = "float32"
"""Type of adapters on the wire, as in files; engines cast them to their own."""


class TransferError(RftError):
    """Weights that did not arrive as they were sent.

    Attributes:
        is_half_applied: whether some of them have been loaded.
    """

    is_half_applied = False


_Typed = tuple[WireTensor, str]
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
    """One rank's share of a bucket; the first `data_start` bytes hold the hashes."""

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
        num_bytes: size of the tensors, each padded to whole blocks.
    """

    slots: tuple[Slot, ...]
    messages: tuple[Message, ...]
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class TransferPlan:
    """One transfer, as one member sees it. Picklable: an engine hands it to its worker processes.

    Attributes:
        transfer_id: which transfer; sent first, so that members of different transfers cannot meet unnoticed.
        group_id: the group; a member of another one leaves that and joins this one.
        backend: gloo, nccl or ipc.
        host, port: address of the store at which the group meets.
        num_ranks: size of the group; the first ranks are those of the trainer.
        first_rank: rank of the engine's first process; 0 in the trainer.
        tensors: what is sent.
        dtype: type of the tensors on the wire.
        in_float32: names of tensors that travel in float32 because an engine keeps them so; in the order of `tensors`.
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
        """The tensors that an engine gets, tied ones under each of their names."""
        return shapes_of(self.tensors)

    @property
    def tied_names(self) -> dict[str, list[str]]:
        """The other names of each tensor that travels for tied ones."""
        names: dict[str, list[str]] = {}
        for tensor in self.tensors:
            if tensor.same_as is not None:
                names.setdefault(tensor.same_as, []).append(tensor.name)
        return names

    def buckets(self) -> tuple[Bucket, ...]:
        """Return the buckets in the order in which they are sent."""
        return _buckets(self.tensors, self.dtype, self.in_float32, self.bucket_bytes)

    def refuse_other_type(self, dtype: str, in_float32: Collection[str] = ()) -> None:
        """Refuse weights in another type than the engine's, and adapters in another than float32, before anything is received.

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


def checksum_of_hashes(hashes: Sequence[int]) -> str:
    """Return one checksum for all tensors, 16 hex digits."""
    return xxhash.xxh3_64_hexdigest(b"".join(value.to_bytes(HASH_BYTES, "little", signed=True) for value in hashes))


@lru_cache(maxsize=4)
def _buckets(
    tensors: tuple[WireTensor, ...], dtype: str, in_float32: tuple[str, ...], bucket_bytes: int
) -> tuple[Bucket, ...]:
    wide = frozenset(in_float32)
    travelling = [(tensor, "float32" if tensor.name in wide else dtype) for tensor in tensors if tensor.same_as is None]
    return tuple(_bucket(members) for members in _split_by_size(travelling, bucket_bytes))


def _split_by_size(tensors: Sequence[_Typed], bucket_bytes: int) -> Iterator[list[_Typed]]:
    """Yield the tensors of one bucket at a time."""
    bucket: list[_Typed] = []
    total = 0
    for tensor, dtype in tensors:
        padded = _whole_blocks(math.prod(tensor.shape) * _ITEM_BYTES[dtype])
        if bucket and total + padded > bucket_bytes:
            yield bucket
            bucket, total = [], 0
        bucket.append((tensor, dtype))
        total += padded
    if bucket:
        yield bucket


def _bucket(tensors: Sequence[_Typed]) -> Bucket:
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
