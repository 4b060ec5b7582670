"""What both sides of a transfer know before its first byte: the group, and which bytes of which bucket are which tensor.

Buckets follow from the tensor list, the type on the wire and the bucket size alone, so that they need not be sent. A bucket begins with one 64-bit
hash per tensor in it; the tensors follow, each at a multiple of 16 bytes, zeros between them. A tensor larger than the bucket size has its own bucket.

Importing this module does not import torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import xxhash

from rftdata.errors import RftError

_ALIGNMENT = 16
_HASH_BYTES = 8
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

TensorShapes = tuple[tuple[str, tuple[int, ...]], ...]
"""Name and shape of every tensor, in the order in which they are sent."""


class TransferError(RftError):
    """Weights that did not arrive as they were sent.

    Attributes:
        is_half_applied: whether some of them have been loaded.
    """

    is_half_applied = False


@dataclass(frozen=True)
class Slot:
    """The place of one tensor in a bucket.

    Attributes:
        start, num_bytes: in bytes, from the start of the bucket; without padding.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int

    @property
    def padded_bytes(self) -> int:
        return _padded(self.num_bytes)


@dataclass(frozen=True)
class Bucket:
    """Tensors that are sent together; `num_bytes` includes their hashes."""

    slots: tuple[Slot, ...]
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class TransferPlan:
    """One transfer, as one member sees it. Picklable: an engine hands it to its worker processes.

    Attributes:
        transfer_id: which transfer; sent first, so that members of different transfers cannot meet unnoticed.
        group_id: the group; a member that is in another one leaves that and joins this.
        backend: gloo or nccl.
        host, port: of the store at which the group meets.
        num_ranks: size of the group; the trainer is rank 0.
        first_rank: rank of the engine's first process.
        tensors: what is sent.
        dtype: type of all tensors on the wire.
        bucket_bytes: size up to which tensors are packed together.
        timeout_s: longest wait for any one bucket, or for a member to join.
    """

    transfer_id: int
    group_id: int
    backend: str
    host: str
    port: int
    num_ranks: int
    first_rank: int
    tensors: TensorShapes
    dtype: str
    bucket_bytes: int
    timeout_s: float

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors, without hashes and padding."""
        return sum(slot.num_bytes for bucket in self.buckets() for slot in bucket.slots)

    def buckets(self) -> Iterator[Bucket]:
        """Yield the buckets in the order in which they are sent."""
        found: list[tuple[str, tuple[int, ...], int]] = []
        total = 0
        for name, shape in self.tensors:
            num_bytes = math.prod(shape) * _ITEM_BYTES[self.dtype]
            if found and total + _padded(num_bytes) > self.bucket_bytes:
                yield _bucket(found)
                found, total = [], 0
            found.append((name, tuple(shape), num_bytes))
            total += _padded(num_bytes)
        if found:
            yield _bucket(found)

    def refuse_other_type(self, dtype: str) -> None:
        """Refuse a transfer in another type than that of the engine; nothing has been received then.

        Raises:
            RftError: the types differ.
        """
        if self.dtype != dtype:
            raise RftError(
                f"transfer {self.transfer_id} sends weights in a type that is not the engine's", value=self.dtype, allowed=dtype,
                todo="give all explorers of the run the same explorer.engine_args.dtype",
            )  # fmt: skip


def fingerprint(tensors: TensorShapes) -> str:
    """Return xxh3_64 of a tensor list, 16 hex digits."""
    return xxhash.xxh3_64_hexdigest(json.dumps([[name, list(shape)] for name, shape in tensors]).encode())


def checksum_of_hashes(hashes: Sequence[int]) -> str:
    """Return one checksum for all tensors, 16 hex digits."""
    return xxhash.xxh3_64_hexdigest(b"".join(value.to_bytes(_HASH_BYTES, "little", signed=True) for value in hashes))


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _bucket(tensors: list[tuple[str, tuple[int, ...], int]]) -> Bucket:
    start, slots = _padded(_HASH_BYTES * len(tensors)), []
    for name, shape, num_bytes in tensors:
        slots.append(Slot(name, shape, start, num_bytes))
        start += _padded(num_bytes)
    return Bucket(tuple(slots), start)
