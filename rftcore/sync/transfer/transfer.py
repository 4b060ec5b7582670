"""The tensors' way from the ranks of a trainer into engines: cast, packed, hashed, broadcast; received, put together, compared, loaded.

Every rank of the trainer sends the rows that it holds, in the type that engines hold them in. It holds the messages of a few buckets, never a second copy of
its share, and no rank holds the whole model. A member compares the hashes of a bucket's tensors, as it has put them together, before it loads anything of the
bucket, and the whole list is compared before the first. What arrives is loaded at once, so an error in the middle leaves
an engine with weights of two versions: `TransferError.is_half_applied` tells, and such an engine must not sample. Adapters are
small: they are loaded when all of them have arrived, so that an engine keeps its own until then.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from rftcore.sync.transfer.group import Pending, TransferGroup, always_wanted
from rftcore.sync.transfer.hashes import hashes_of
from rftcore.sync.transfer.ipc_group import IpcGroup
from rftcore.sync.transfer.plan import (
    HASH_BYTES,
    Bucket,
    Message,
    TransferError,
    TransferPlan,
    checksum_of_hashes,
    fingerprint,
)
from rftdata.failpoints import failpoint

_AHEAD = 2  # buckets on their way while another is packed or loaded


@dataclass(frozen=True)
class HeldRows:
    """What one rank of a trainer holds of a tensor.

    Attributes:
        first_row: of the tensor.
        rows: consecutive rows; a number where the tensor is one. In any type.
    """

    name: str
    first_row: int
    rows: Tensor


@dataclass(frozen=True)
class Sent:
    """What a transfer sent, all ranks together.

    Attributes:
        checksum: of all hashes.
        join_seconds: until the group was there.
        seconds: from the first bucket to the last.
    """

    checksum: str
    num_bytes: int
    join_seconds: float
    seconds: float


class TransferSender:
    """The end of one rank of the trainer. Keeps the group while its members stay the same."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.group: TransferGroup | None = None

    def send(
        self,
        plan: TransferPlan,
        held: Iterable[HeldRows],
        store: TCPStore | None = None,
        check: Callable[[], None] = always_wanted,
    ) -> Sent:
        """Send what this rank holds, in the plan's group, which is formed unless it exists.

        Args:
            held: of every tensor that travels, in the plan's order. It is taken to the last one even if a member fails, because the other ranks
                of the trainer may be needed to produce it.
            store: where the group meets, in the rank that opened it.
            check: called while other members are waited for; what it raises ends the transfer.

        Raises:
            GroupError: a member failed or did not come; some may have received everything.
            TransferError: the tensors are not those of the plan.
        """
        stream = iter(held)
        started = time.monotonic()
        try:
            group = self._join(plan, store, check)
            joined = time.monotonic()
            hashes = self._send(group, plan, stream)
        except BaseException:
            self.leave()
            raise
        finally:
            for _ in stream:
                pass
        return Sent(checksum_of_hashes(hashes), plan.num_bytes, joined - started, time.monotonic() - joined)

    def _join(
        self, plan: TransferPlan, store: TCPStore | None, check: Callable[[], None] = always_wanted
    ) -> TransferGroup:
        if self.group is None or self.group.group_id != plan.group_id:
            self.leave()
            self.group = _joined(plan, (plan.host, plan.port) if store is None else store, self.rank, check)
        return self.group

    def _send(self, group: TransferGroup, plan: TransferPlan, held: Iterator[HeldRows]) -> list[int]:
        """Return the hash of every tensor that travelled."""
        _exchange_header(group, plan)
        memory = _Memory(group.device)
        on_their_way: deque[list[_Broadcast]] = deque()
        hashes: list[Tensor] = []
        buckets = plan.buckets()
        for number, bucket in enumerate(buckets):
            if len(on_their_way) == _AHEAD:
                hashes.append(_hashes_sent(buckets[number - _AHEAD], on_their_way.popleft()))
            broadcasts = []
            # Packed before the first message begins, which others may still be preparing.
            own = self._packed(bucket, plan, held, memory, number)
            for message in bucket.messages:
                packed = own if message.sender == self.rank else memory.message(number, message)
                broadcasts.append(_Broadcast(message, packed, group.broadcast(packed, message.sender)))
            on_their_way.append(broadcasts)
            failpoint("trainer.weights_half_sent")
        for bucket, broadcasts in zip(buckets[-len(on_their_way) :], on_their_way, strict=True):
            hashes.append(_hashes_sent(bucket, broadcasts))
        return [number for found in hashes for number in found.tolist()]

    def _packed(
        self, bucket: Bucket, plan: TransferPlan, held: Iterator[HeldRows], memory: _Memory, number: int
    ) -> Tensor:
        """Return this rank's message of a bucket; empty if it has none."""
        rows = [_fitting(next(held, None), slot.name, slot.shape) for slot in bucket.slots]
        message = next((each for each in bucket.messages if each.sender == self.rank), None)
        if message is None:
            return torch.empty(0, dtype=torch.uint8, device=memory.device)
        packed = memory.message(number, message)
        _zero_gaps(packed, message.data_start, [(piece.start, piece.num_bytes) for piece in message.pieces])
        copies = defaultdict[str, tuple[list[Tensor], list[Tensor]]](lambda: ([], []))
        for piece in message.pieces:
            found, slot = rows[piece.slot], bucket.slots[piece.slot]
            first = piece.first_row - found.first_row
            part = found.rows[first : first + piece.num_rows] if found.rows.ndim else found.rows
            target = packed[piece.start : piece.start + piece.num_bytes].view(getattr(torch, slot.dtype))
            if first < 0 or len(target) != part.numel():
                raise _other_tensors(found, slot.name, slot.shape)
            # Tensors of one type are copied at once.
            targets, sources = copies[slot.dtype]
            targets.append(target)
            sources.append(part.reshape(-1))
        for targets, sources in copies.values():
            torch._foreach_copy_(targets, sources)
        spans = [(piece.offset, piece.num_bytes) for piece in message.pieces]
        found_hashes = hashes_of(packed[message.data_start :], spans)
        packed[: HASH_BYTES * len(spans)].view(torch.int64).copy_(found_hashes)
        return packed

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
    ) -> str:
        """Load all tensors of a transfer; return the checksum of their hashes. On a GPU they have been loaded when it returns.

        Args:
            worker_rank: of this process in its engine.
            load: loads named tensors into the model as they come; it may keep them until the last. Tied tensors come one after the other, as one.

        Raises:
            TransferError: a member failed, or something else arrived than was sent; `is_half_applied` tells whether the old weights are still whole.
        """
        arrivals = _Arrivals(plan)
        changes_weights = plan.adapters is None
        try:
            self._join(plan, plan.first_rank + worker_rank)
            assert self.group is not None
            arrivals.begin(self.group)
            tensors: Iterator[tuple[str, Tensor]] = arrivals
            if plan.adapters is not None:
                tensors = iter(list(arrivals))
                changes_weights = True
            load(tensors)
            arrivals.refuse_rest()
            if self.group.device.type == "cuda":
                torch.cuda.synchronize(self.group.device)
        except Exception as error:
            self.leave()
            failure = TransferError(
                f"the weights of transfer {plan.transfer_id} were not applied: {type(error).__name__}: {error}",
                todo="the trainer offers them again, or writes them as a file",
            )
            failure.is_half_applied = changes_weights and arrivals.num_loaded > 0
            raise failure from error
        return checksum_of_hashes(arrivals.hashes)

    def _join(self, plan: TransferPlan, rank: int) -> None:
        if self.group is None or self.group.group_id != plan.group_id:
            self.leave()
            self.group = _joined(plan, (plan.host, plan.port), rank)

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
        _exchange_header(group, self._plan)

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
        group, memory = self._group, _Memory(self._group.device)
        tied = self._plan.tied_names
        buckets = self._plan.buckets()
        posted = deque(_post(group, number, bucket, memory) for number, bucket in enumerate(buckets[:_AHEAD]))
        for number, bucket in enumerate(buckets):
            packed, sent = _arrived(bucket, posted.popleft())
            if number + _AHEAD < len(buckets):
                posted.append(_post(group, number + _AHEAD, buckets[number + _AHEAD], memory))
            self._compare(bucket, packed, sent)
            for slot in bucket.slots:
                tensor = (
                    packed[slot.start : slot.start + slot.num_bytes].view(getattr(torch, slot.dtype)).view(slot.shape)
                )
                for name in (slot.name, *tied.get(slot.name, ())):
                    yield name, tensor

    def _compare(self, bucket: Bucket, packed: Tensor, sent: Tensor) -> None:
        found = hashes_of(packed, [(0, slot.num_bytes) for slot in bucket.slots])
        ours, theirs = torch.stack([found, sent]).tolist()
        for slot, own, expected in zip(bucket.slots, ours, theirs, strict=True):
            if own != expected:
                raise TransferError(
                    f"{slot.name} arrived with other bytes than were sent", value=f"{own:x}", allowed=f"{expected:x}"
                )
        self.hashes += ours


@dataclass(frozen=True)
class _Broadcast:
    """A message on its way."""

    message: Message
    packed: Tensor
    call: Pending


class _Memory:
    """Buffers of messages, used again by every message of the same sender `_AHEAD` buckets later."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: dict[tuple[int, int], Tensor] = {}

    def message(self, bucket_number: int, message: Message) -> Tensor:
        """Return room for a message."""
        key = (bucket_number % _AHEAD, message.sender)
        buffer = self._buffers.get(key)
        if buffer is None or len(buffer) < message.num_bytes:
            buffer = self._buffers[key] = self.fresh(message.num_bytes)
        return buffer[: message.num_bytes]

    def fresh(self, num_bytes: int) -> Tensor:
        """Return memory that is used once."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)


def _joined(
    plan: TransferPlan, store: TCPStore | tuple[str, int], rank: int, check: Callable[[], None] = always_wanted
) -> TransferGroup:
    """Return the membership of a rank in the plan's group."""
    if plan.backend == "ipc":
        return IpcGroup(store, plan.group_id, rank, plan.num_ranks, plan.timeout_s, check=check)
    return TransferGroup(plan.backend, store, plan.group_id, rank, plan.num_ranks, plan.timeout_s, check)


def _exchange_header(group: TransferGroup, plan: TransferPlan) -> None:
    """Compare which transfer of which tensors the members take part in; the trainer's first rank sends its own."""
    number = int(fingerprint(plan.tensors), 16)
    types = xxhash.xxh3_64_intdigest(f"{plan.dtype} {plan.in_float32}".encode())
    values = [plan.transfer_id, number - (1 << 63), len(plan.tensors), plan.bucket_bytes, types - (1 << 63)]
    header = torch.tensor(values, dtype=torch.int64, device=group.device)
    group.broadcast(header, 0).wait()
    found = header.tolist()
    if found != values:
        raise TransferError("the sender sends another transfer, or other tensors", value=found, allowed=str(values))


def _fitting(held: HeldRows | None, name: str, shape: tuple[int, ...]) -> HeldRows:
    """Return what is held if it is of this tensor."""
    if held is None or held.name != name or tuple(held.rows.shape[1:]) != shape[1:]:
        raise _other_tensors(held, name, shape)
    return held


def _other_tensors(held: HeldRows | None, name: str, shape: tuple[int, ...]) -> TransferError:
    found = None if held is None else (held.name, held.first_row, tuple(held.rows.shape))
    return TransferError("the trainer's tensors are not those it offered", value=found, allowed=f"{name} {shape}")


def _hashes_sent(bucket: Bucket, broadcasts: list[_Broadcast]) -> Tensor:
    """Wait for the messages of a bucket; return the hashes of its tensors as they were sent, int64 [tensors], on their device."""
    for broadcast in broadcasts:
        broadcast.call.wait()
    slots = [piece.slot for broadcast in broadcasts for piece in broadcast.message.pieces]
    parts = [each.packed[: HASH_BYTES * len(each.message.pieces)].view(torch.int64) for each in broadcasts]
    sums = torch.zeros(len(bucket.slots), dtype=torch.int64)
    if not parts:
        return sums
    found = torch.cat(parts)
    return sums.to(found.device).index_add_(0, torch.tensor(slots).to(found.device), found)


def _post(group: TransferGroup, number: int, bucket: Bucket, memory: _Memory) -> list[_Broadcast]:
    """Begin to receive the messages of a bucket."""
    # What comes from one rank alone is a bucket as the engine loads it: loaders keep tensors until their layer is complete.
    is_whole = _is_whole(bucket)
    posted = []
    for message in bucket.messages:
        packed = memory.fresh(message.num_bytes) if is_whole else memory.message(number, message)
        posted.append(_Broadcast(message, packed, group.broadcast(packed, message.sender)))
    return posted


def _is_whole(bucket: Bucket) -> bool:
    """Whether one rank sends the bucket, each tensor of it as one piece."""
    return len(bucket.messages) == 1 and len(bucket.messages[0].pieces) == len(bucket.slots)


def _arrived(bucket: Bucket, posted: list[_Broadcast]) -> tuple[Tensor, Tensor]:
    """Return the whole tensors of a bucket, and their hashes as they were sent."""
    sent = _hashes_sent(bucket, posted)
    if _is_whole(bucket):
        return posted[0].packed[posted[0].message.data_start :], sent
    packed = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=sent.device)
    _zero_gaps(packed, 0, [(slot.start, slot.num_bytes) for slot in bucket.slots])
    # By two bytes, of which all types are made.
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


def _zero_gaps(packed: Tensor, start: int, used: list[tuple[int, int]]) -> None:
    """Set everything from `start` that is not used to zero; used: (first byte, number of bytes), ascending."""
    gaps = []
    for first, num_bytes in used:
        gaps.append(packed[start:first])
        start = first + num_bytes
    gaps.append(packed[start:])
    if gaps := [gap for gap in gaps if len(gap)]:
        torch._foreach_zero_(gaps)
