"""Receiving side of a transfer of weights, in every process of an engine: tensors are received, put together, compared and loaded.

A member compares the hashes of a bucket's tensors, as it has put them together, before it loads anything of the bucket, and the whole list of
tensors before the first bucket. What arrives is loaded at once, so an error in the middle leaves an engine with weights of two versions.
`TransferError.is_half_applied` is then true, and such an engine must not sample. Adapters are small: they are loaded when all of them
have arrived, so that an engine keeps its own until then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from rftcore.sync.transfer.group import TransferGroup
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
from rftcore.sync.transfer.plan import Bucket, TransferError, TransferPlan, checksum_of_hashes
from rftdata.failpoints import failpoint


class TransferReceiver(GroupMember):
    """Receiving side of one process of an engine."""

    def receive(
        self, plan: TransferPlan, worker_rank: int, load: Callable[[Iterator[tuple[str, Tensor]]], object]
    ) -> str:
        """Load all tensors of a transfer; return the checksum of their hashes. On a GPU they have been loaded when it returns.

        Args:
            worker_rank: rank of this process in its engine.
            load: loads named tensors into the model as they come; it may keep them until the last. Tied tensors come one after the other, as one.

        Raises:
            TransferError: a member failed, or something else arrived than was sent; `is_half_applied` tells whether the old weights are still whole.
        """
        arrivals = _Arrivals(plan)
        changes_weights = plan.adapters is None
        try:
            group = self.join(plan, plan.first_rank + worker_rank)
            arrivals.begin(group)
            tensors: Iterator[tuple[str, Tensor]] = arrivals
            if plan.adapters is not None:
                tensors = iter(list(arrivals))
                changes_weights = True
            load(tensors)
            arrivals.refuse_rest()
            if group.device.type == "cuda":
                torch.cuda.synchronize(group.device)
        except Exception as error:
            self.leave()
            failure = TransferError(
                f"the weights of transfer {plan.transfer_id} were not applied: {type(error).__name__}: {error}",
                todo="the trainer offers them again, or writes them as a file",
            )
            failure.is_half_applied = changes_weights and arrivals.num_loaded > 0
            raise failure from error
        return checksum_of_hashes(arrivals.hashes)


class _Arrivals(Iterator[tuple[str, Tensor]]):
    """The tensors of a transfer, as they arrive."""

    def __init__(self, plan: TransferPlan) -> None:
        self._plan = plan
        self._tensors = self._receive()
        self._group: TransferGroup | None = None
        self.hashes: list[int] = []
        self.num_loaded = 0

    def begin(self, group: TransferGroup) -> None:
        """Compare the transfer's header; nothing has been loaded before."""
        self._group = group
        exchange_header(group, self._plan)

    def __next__(self) -> tuple[str, Tensor]:
        if self.num_loaded == 1:
            failpoint("explorer.weights_half_loaded")
        named = next(self._tensors)
        self.num_loaded += 1
        return named

    def refuse_rest(self) -> None:
        """Raise if the loader has not taken everything."""
        if self.num_loaded != len(self._plan.tensors):
            raise TransferError(f"the engine took {self.num_loaded} of {len(self._plan.tensors)} tensors")

    def _receive(self) -> Iterator[tuple[str, Tensor]]:
        assert self._group is not None
        group, memory = self._group, MessageMemory(self._group.device)
        tied = self._plan.tied_names
        buckets = self._plan.buckets()
        posted = deque(_post(group, number, bucket, memory) for number, bucket in enumerate(buckets[:BUCKETS_AHEAD]))
        for number, bucket in enumerate(buckets):
            packed, sent = _take(bucket, posted.popleft())
            if number + BUCKETS_AHEAD < len(buckets):
                posted.append(_post(group, number + BUCKETS_AHEAD, buckets[number + BUCKETS_AHEAD], memory))
            self._compare(bucket, packed, sent)
            for slot in bucket.slots:
                tensor = (
                    packed[slot.start : slot.start + slot.num_bytes].view(getattr(torch, slot.dtype)).view(slot.shape)
                )
                for name in (slot.name, *tied.get(slot.name, ())):
                    yield name, tensor

    def _compare(self, bucket: Bucket, packed: Tensor, sent: Tensor) -> None:
        """Compare the hashes of a bucket's tensors as they arrived and as they were sent."""
        arrived = hashes_of(packed, [(0, slot.num_bytes) for slot in bucket.slots])
        ours, theirs = torch.stack([arrived, sent]).tolist()
        for slot, own, expected in zip(bucket.slots, ours, theirs, strict=True):
            if own != expected:
                raise TransferError(
                    f"{slot.name} arrived with other bytes than were sent", value=f"{own:x}", allowed=f"{expected:x}"
                )
        self.hashes += ours


def _post(group: TransferGroup, number: int, bucket: Bucket, memory: MessageMemory) -> list[Broadcast]:
    """Begin to receive the messages of a bucket."""
    # What comes from one rank alone is a bucket as the engine loads it: loaders keep tensors until their layer is complete.
    is_whole = _is_whole(bucket)
    posted = []
    for message in bucket.messages:
        packed = memory.fresh(message.num_bytes) if is_whole else memory.message(number, message)
        posted.append(Broadcast(message, packed, group.broadcast(packed, message.sender)))
    return posted


def _is_whole(bucket: Bucket) -> bool:
    """Return whether one rank sends the bucket, each tensor of it as one piece."""
    return len(bucket.messages) == 1 and len(bucket.messages[0].pieces) == len(bucket.slots)


def _take(bucket: Bucket, posted: Sequence[Broadcast]) -> tuple[Tensor, Tensor]:
    """Wait for a bucket; return its whole tensors, and their hashes as they were sent."""
    sent = await_hashes(bucket, posted)
    if _is_whole(bucket):
        return posted[0].packed[posted[0].message.data_start :], sent
    packed = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=sent.device)
    zero_gaps(packed, 0, [(slot.start, slot.num_bytes) for slot in bucket.slots])
    # In units of two bytes, since the size of every type is a multiple of two.
    values, width = packed.view(torch.int16), 2
    sources, targets = [], []
    for each in posted:
        arrived = each.packed.view(torch.int16)
        for piece in each.message.pieces:
            first = (bucket.slots[piece.slot].start + piece.offset) // width
            count, start = piece.num_bytes // width, piece.start // width
            sources.append(arrived[start : start + count])
            targets.append(values[first : first + count])
    torch._foreach_copy_(targets, sources)
    return packed, sent
