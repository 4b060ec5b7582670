"""Sending side of a transfer of weights, in every rank of a trainer: rows are cast, packed, hashed and broadcast.

Every rank sends the rows that it holds, in the type that engines hold them in. It holds the messages of a few buckets, never a second copy of
its share, and no rank holds the whole model.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from rftcore.sync.tensors import HeldRows
from rftcore.sync.transfer.group import TransferGroup, always_wanted
from rftcore.sync.transfer.hashes import hashes_of
from rftcore.sync.transfer.member import (
    BUCKETS_AHEAD,
    Broadcast,
    GroupMember,
    MessageMemory,
    await_hashes,
    exchange_header,
    zero_gaps,
)
from rftcore.sync.transfer.plan import HASH_BYTES, Bucket, Slot, TransferError, TransferPlan, checksum_of_hashes
from rftdata.failpoints import failpoint


@dataclass(frozen=True)
class Sent:
    """What a transfer sent, all ranks together.

    Attributes:
        checksum: checksum of all hashes.
        join_seconds: time until the group was there.
        seconds: time from the first bucket to the last.
    """

    checksum: str
    num_bytes: int
    join_seconds: float
    seconds: float


class TransferSender(GroupMember):
    """Sending side of one rank of a trainer."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        self.rank = rank

    def send(
        self,
        plan: TransferPlan,
        held: Iterable[HeldRows],
        store: TCPStore | None = None,
        check: Callable[[], None] = always_wanted,
    ) -> Sent:
        """Send what this rank holds, in the plan's group, which is formed unless it exists.

        Args:
            held: rows of every tensor that travels, in the plan's order. It is taken to the last one even if a member fails, because the other
                ranks of the trainer may be needed to produce it.
            store: where the group meets, in the rank that opened it.
            check: called while other members are waited for; what it raises ends the transfer.

        Raises:
            GroupError: a member failed or did not come; some may have received everything.
            TransferError: the tensors are not those of the plan.
        """
        stream = iter(held)
        started = time.monotonic()
        try:
            group = self.join(plan, self.rank, store, check)
            joined = time.monotonic()
            hashes = self._send(group, plan, stream)
        except BaseException:
            self.leave()
            raise
        finally:
            for _ in stream:
                pass
        return Sent(checksum_of_hashes(hashes), plan.num_bytes, joined - started, time.monotonic() - joined)

    def _send(self, group: TransferGroup, plan: TransferPlan, held: Iterator[HeldRows]) -> list[int]:
        """Send all buckets; return the hash of every tensor that travelled."""
        exchange_header(group, plan)
        memory = MessageMemory(group.device)
        on_their_way: deque[list[Broadcast]] = deque()
        hashes: list[Tensor] = []
        buckets = plan.buckets()
        for number, bucket in enumerate(buckets):
            if len(on_their_way) == BUCKETS_AHEAD:
                hashes.append(await_hashes(buckets[number - BUCKETS_AHEAD], on_their_way.popleft()))
            broadcasts = []
            # Packed before the first message begins, which others may still be preparing.
            own = self._pack(bucket, held, memory, number)
            for message in bucket.messages:
                packed = own if message.sender == self.rank else memory.message(number, message)
                broadcasts.append(Broadcast(message, packed, group.broadcast(packed, message.sender)))
            on_their_way.append(broadcasts)
            failpoint("trainer.weights_half_sent")
        for bucket, broadcasts in zip(buckets[-len(on_their_way) :], on_their_way, strict=True):
            hashes.append(await_hashes(bucket, broadcasts))
        return [value for of_bucket in hashes for value in of_bucket.tolist()]

    def _pack(self, bucket: Bucket, held: Iterator[HeldRows], memory: MessageMemory, number: int) -> Tensor:
        """Return this rank's message of a bucket; empty if it has none."""
        held_of_slots = [_next_of(held, slot) for slot in bucket.slots]
        message = next((each for each in bucket.messages if each.sender == self.rank), None)
        if message is None:
            return torch.empty(0, dtype=torch.uint8, device=memory.device)
        packed = memory.message(number, message)
        zero_gaps(packed, message.data_start, [(piece.start, piece.num_bytes) for piece in message.pieces])
        copies = defaultdict[str, tuple[list[Tensor], list[Tensor]]](lambda: ([], []))
        for piece in message.pieces:
            own, slot = held_of_slots[piece.slot], bucket.slots[piece.slot]
            first = piece.first_row - own.first_row
            part = own.rows[first : first + piece.num_rows] if own.rows.ndim else own.rows
            target = packed[piece.start : piece.start + piece.num_bytes].view(getattr(torch, slot.dtype))
            if first < 0 or len(target) != part.numel():
                raise _other_tensors(own, slot)
            # Tensors of one type are copied at once.
            targets, sources = copies[slot.dtype]
            targets.append(target)
            sources.append(part.reshape(-1))
        for targets, sources in copies.values():
            torch._foreach_copy_(targets, sources)
        spans = [(piece.offset, piece.num_bytes) for piece in message.pieces]
        hashes = hashes_of(packed[message.data_start :], spans)
        packed[: HASH_BYTES * len(spans)].view(torch.int64).copy_(hashes)
        return packed


def _next_of(held: Iterator[HeldRows], slot: Slot) -> HeldRows:
    """Return the next rows, which must be of this tensor.

    Raises:
        TransferError: they are of another, or there are none.
    """
    rows = next(held, None)
    if rows is None or rows.name != slot.name or tuple(rows.rows.shape[1:]) != slot.shape[1:]:
        raise _other_tensors(rows, slot)
    return rows


def _other_tensors(held: HeldRows | None, slot: Slot) -> TransferError:
    value = None if held is None else (held.name, held.first_row, tuple(held.rows.shape))
    return TransferError(
        "the trainer's tensors are not those it offered", value=value, allowed=f"{slot.name} {slot.shape}"
    )
