"""The tensors' way from a trainer into engines: cast, packed, hashed, broadcast; received, compared, loaded.

The trainer streams: it holds two buckets and the tensor that it packs, never a second copy of the model. A member compares the hashes of a bucket before
it loads anything of it, and the whole list is compared before the first. What arrives is loaded at once, so an error in the middle leaves
an engine with weights of two versions: `TransferError.is_half_applied` tells, and such an engine must not sample.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from rftcore.sync.transfer_group import Call, TransferGroup, hashes_of
from rftcore.sync.transfer_plan import Bucket, Slot, TransferError, TransferPlan, checksum_of_hashes, fingerprint

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sent:
    """What a transfer sent.

    Attributes:
        checksum: of all hashes.
        seconds: from the first bucket to the last.
    """

    checksum: str
    num_bytes: int
    seconds: float


class TransferSender:
    """The trainer's end. Keeps the group while its members stay the same."""

    def __init__(self) -> None:
        self.group: TransferGroup | None = None

    def join(self, plan: TransferPlan, store: TCPStore) -> None:
        """Form the plan's group, unless it exists.

        Raises:
            GroupError: a member did not come.
        """
        if self.group is None or self.group.group_id != plan.group_id:
            self.leave()
            self.group = TransferGroup(plan.backend, store, plan.group_id, 0, plan.num_ranks, plan.timeout_s)

    def send(self, plan: TransferPlan, tensors: Iterable[tuple[str, Tensor]]) -> Sent:
        """Send all tensors; they are taken to the last one even if a member fails.

        Raises:
            GroupError: a member failed; some may have received everything.
            TransferError: the tensors are not those of the plan.
        """
        assert self.group is not None
        stream = iter(tensors)
        try:
            return self._send(self.group, plan, stream)
        except BaseException:
            self.leave()
            raise
        finally:
            for _ in stream:  # the other ranks of the trainer walk with this one
                pass

    def _send(self, group: TransferGroup, plan: TransferPlan, tensors: Iterator[tuple[str, Tensor]]) -> Sent:
        started = time.monotonic()
        hashes: list[Tensor] = []
        on_their_way: list[Call] = [group.broadcast(_header(plan, group.device))]
        for bucket in plan.buckets():
            packed = _pack(bucket, plan, tensors, group.device)
            found = hashes_of([_bytes_of(packed, slot) for slot in bucket.slots])
            packed[: 8 * len(found)].view(torch.int64).copy_(found)
            while len(on_their_way) > 1:
                on_their_way.pop(0).wait()
            on_their_way.append(group.broadcast(packed))
            hashes.append(found)
        for broadcast in on_their_way:
            broadcast.wait()
        checksum = checksum_of_hashes(torch.cat(hashes).tolist())
        return Sent(checksum, plan.num_bytes, time.monotonic() - started)

    def leave(self) -> None:
        """Leave the group, if there is one."""
        if self.group is not None:
            self.group.abort()
            self.group = None


class TransferReceiver:
    """The end of one process of an engine."""

    def __init__(self) -> None:
        self.group: TransferGroup | None = None

    def receive(
        self, plan: TransferPlan, worker_rank: int, load: Callable[[Iterator[tuple[str, Tensor]]], object]
    ) -> str:  # fmt: skip
        """Load all tensors of a transfer; return the checksum of their hashes.

        Args:
            worker_rank: of this process in its engine.
            load: loads named tensors into the model as they come; it may keep them until the last.

        Raises:
            TransferError: a member failed, or something else arrived than was sent; `is_half_applied` tells whether the old weights are still whole.
        """
        arrivals = _Arrivals(plan)
        try:
            self._join(plan, plan.first_rank + worker_rank)
            assert self.group is not None
            arrivals.begin(self.group)
            load(arrivals)
            arrivals.refuse_rest()
        except Exception as error:
            self.leave()
            failure = TransferError(
                f"the weights of transfer {plan.transfer_id} were not applied: {type(error).__name__}: {error}",
                todo="the trainer offers them again, or writes them as a file",
            )
            failure.is_half_applied = arrivals.num_loaded > 0
            raise failure from error
        return checksum_of_hashes(arrivals.hashes)

    def _join(self, plan: TransferPlan, rank: int) -> None:
        if self.group is None or self.group.group_id != plan.group_id:
            self.leave()
            self.group = TransferGroup(
                plan.backend, (plan.host, plan.port), plan.group_id, rank, plan.num_ranks, plan.timeout_s
            )

    def leave(self) -> None:
        """Leave the group, if there is one."""
        if self.group is not None:
            self.group.abort()
            self.group = None


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
        own = _header(self._plan, group.device)
        found = torch.empty_like(own)
        group.broadcast(found).wait()
        if found.tolist() != own.tolist():
            raise TransferError(
                "the sender sends another transfer, or other tensors", value=found.tolist(), allowed=str(own.tolist())
            )

    def __next__(self) -> tuple[str, Tensor]:
        named = next(self._tensors)
        self.num_loaded += 1
        return named

    def refuse_rest(self) -> None:
        """Raise if the loader has not taken everything."""
        if self.num_loaded != len(self._plan.tensors):
            raise TransferError(f"the engine took {self.num_loaded} of {len(self._plan.tensors)} tensors")

    def _receive(self) -> Iterator[tuple[str, Tensor]]:
        assert self._group is not None
        dtype = getattr(torch, self._plan.dtype)
        for bucket in self._plan.buckets():
            # A buffer for each bucket: loaders keep tensors until their layer is complete.
            packed = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=self._group.device)
            self._group.broadcast(packed).wait()
            sent = packed[: 8 * len(bucket.slots)].view(torch.int64).tolist()
            found = hashes_of([_bytes_of(packed, slot) for slot in bucket.slots]).tolist()
            for slot, ours, theirs in zip(bucket.slots, found, sent, strict=True):
                if ours != theirs:
                    raise TransferError(
                        f"{slot.name} arrived with other bytes than were sent", value=f"{ours:x}", allowed=f"{theirs:x}"
                    )
            self.hashes += found
            for slot in bucket.slots:
                yield slot.name, packed[slot.start : slot.start + slot.num_bytes].view(dtype).view(slot.shape)


def _pack(bucket: Bucket, plan: TransferPlan, tensors: Iterator[tuple[str, Tensor]], device: torch.device) -> Tensor:
    packed = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=device)
    dtype = getattr(torch, plan.dtype)
    for slot in bucket.slots:
        name, tensor = next(tensors, ("nothing", torch.empty(0)))
        if name != slot.name or tuple(tensor.shape) != slot.shape:
            raise TransferError(
                "the trainer's tensors are not those it offered", value=(name, tuple(tensor.shape)), allowed=f"{slot.name} {slot.shape}"
            )  # fmt: skip
        packed[slot.start : slot.start + slot.num_bytes].view(dtype).view(slot.shape).copy_(tensor)
        packed[slot.start + slot.num_bytes : slot.start + slot.padded_bytes].zero_()
    return packed


def _bytes_of(packed: Tensor, slot: Slot) -> Tensor:
    return packed[slot.start : slot.start + slot.padded_bytes]


def _header(plan: TransferPlan, device: torch.device) -> Tensor:
    number = int(fingerprint(plan.tensors), 16)
    values = [plan.transfer_id, number - (1 << 63), len(plan.tensors), plan.bucket_bytes]
    return torch.tensor(values, dtype=torch.int64, device=device)
