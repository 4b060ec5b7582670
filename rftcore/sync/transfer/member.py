"""Member of a transfer, sender or receiver: its group, its messages on their way, and what both sides compare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from rftcore.sync.tensors import fingerprint
from rftcore.sync.transfer.group import Pending, TransferGroup, always_wanted
from rftcore.sync.transfer.ipc_group import IpcGroup
from rftcore.sync.transfer.plan import HASH_BYTES, Bucket, Message, TransferError, TransferPlan

BUCKETS_AHEAD = 2
"""Buckets on their way while another is packed or loaded."""


class GroupMember:
    """A process that sends or receives, and keeps its group while the members stay the same.

    Attributes:
        group: the group; None outside one.
    """

    def __init__(self) -> None:
        self.group: TransferGroup | None = None

    def join(
        self,
        plan: TransferPlan,
        rank: int,
        store: TCPStore | None = None,
        check: Callable[[], None] = always_wanted,
    ) -> TransferGroup:
        """Return the plan's group, which is formed unless this process is in it.

        Args:
            store: where the group meets, in the process that opened it.
            check: see `TransferGroup`.

        Raises:
            GroupError: a member did not come.
        """
        if self.group is None or self.group.group_id != plan.group_id:
            self.leave()
            place = (plan.host, plan.port) if store is None else store
            if plan.backend == "ipc":
                self.group = IpcGroup(place, plan.group_id, rank, plan.num_ranks, plan.timeout_s, check=check)
            else:
                self.group = TransferGroup(
                    plan.backend, place, plan.group_id, rank, plan.num_ranks, plan.timeout_s, check
                )
        return self.group

    def leave(self) -> None:
        """Leave the group, if there is one."""
        if self.group is not None:
            self.group.abort()
            self.group = None


@dataclass(frozen=True)
class Broadcast:
    """A message on its way."""

    message: Message
    packed: Tensor
    call: Pending


class MessageMemory:
    """Buffers of messages, used again by every message of the same sender `BUCKETS_AHEAD` buckets later."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: dict[tuple[int, int], Tensor] = {}

    def message(self, bucket_number: int, message: Message) -> Tensor:
        """Return room for a message."""
        key = (bucket_number % BUCKETS_AHEAD, message.sender)
        buffer = self._buffers.get(key)
        if buffer is None or len(buffer) < message.num_bytes:
            buffer = self._buffers[key] = self.fresh(message.num_bytes)
        return buffer[: message.num_bytes]

    def fresh(self, num_bytes: int) -> Tensor:
        """Return memory that is used once."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)


def exchange_header(group: TransferGroup, plan: TransferPlan) -> None:
    """Refuse a transfer that the members do not all understand alike: they compare their plans with that of the trainer's first rank.

    Raises:
        TransferError: this member's plan is another.
    """
    number = int(fingerprint(plan.tensors), 16)
    types = xxhash.xxh3_64_intdigest(f"{plan.dtype} {plan.in_float32}".encode())
    values = [plan.transfer_id, number - (1 << 63), len(plan.tensors), plan.bucket_bytes, types - (1 << 63)]
    header = torch.tensor(values, dtype=torch.int64, device=group.device)
    group.broadcast(header, 0).wait()
    sent = header.tolist()
    if sent != values:
        raise TransferError("the sender sends another transfer, or other tensors", value=sent, allowed=str(values))


def await_hashes(bucket: Bucket, broadcasts: Sequence[Broadcast]) -> Tensor:
    """Wait for the messages of a bucket; return the hashes of its tensors as they were sent, int64 [tensors], on their device."""
    for broadcast in broadcasts:
        broadcast.call.wait()
    slots = [piece.slot for broadcast in broadcasts for piece in broadcast.message.pieces]
    parts = [each.packed[: HASH_BYTES * len(each.message.pieces)].view(torch.int64) for each in broadcasts]
    sums = torch.zeros(len(bucket.slots), dtype=torch.int64)
    if not parts:
        return sums
    hashes = torch.cat(parts)
    return sums.to(hashes.device).index_add_(0, torch.tensor(slots).to(hashes.device), hashes)


def zero_gaps(packed: Tensor, start: int, used: Sequence[tuple[int, int]]) -> None:
    """Set everything from `start` that is not used to zero.

    Args:
        used: (first byte, number of bytes), ascending.
    """
    gaps = []
    for first, num_bytes in used:
        gaps.append(packed[start:first])
        start = first + num_bytes
    gaps.append(packed[start:])
    if gaps := [gap for gap in gaps if len(gap)]:
        torch._foreach_zero_(gaps)
