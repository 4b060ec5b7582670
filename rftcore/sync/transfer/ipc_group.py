"""Communication group of a transfer on one device (`backend` ipc): a trainer of one rank writes into memory that the engines' processes read.

NCCL refuses two ranks on one GPU, and gloo goes through the host. Here the trainer copies a message, part by part, into two exported buffers by turns, and each
receiver copies it out, on the device. Numbers that go over the group's gloo connections order the copies and reveal the death of a member: each buffer is
`written` for every receiver, then `read` by every receiver. Both sides wait for their own device before they send a number, so they share no events.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from rftcore.sync.transfer.group import TransferGroup, always_wanted
from rftcore.sync.transfer.staging import Staging, import_staging

SENDER = 0
_NUM_BUFFERS = 2
BUFFER_BYTES = 64 << 20
# Tags of the numbers that members send each other.
_WRITTEN, _READ = 1, 2


class IpcGroup(TransferGroup):
    """Membership in a group on one device; see `TransferGroup`. The first rank is the trainer.

    Args:
        buffer_bytes: size of each of the two buffers.
    """

    def __init__(
        self,
        store: TCPStore | tuple[str, int],
        group_id: int,
        rank: int,
        num_ranks: int,
        timeout_s: float,
        *,
        check: Callable[[], None] = always_wanted,
        device: torch.device | None = None,
        buffer_bytes: int | None = None,
    ) -> None:
        self._own: list[Staging] = []
        self._buffers: list[Tensor] = []
        # For each buffer, one number from each receiver.
        self._open_reads: list[list[_ExpectedNumber]] = [[] for _ in range(_NUM_BUFFERS)]
        self._num_parts = 0
        self._timeout = timedelta(seconds=timeout_s)
        super().__init__("gloo", store, group_id, rank, num_ranks, timeout_s, check)
        on_gpu = torch.cuda.is_available()
        self.device = device or (torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu"))
        try:
            self._share(buffer_bytes or BUFFER_BYTES)
        except (RuntimeError, OSError) as error:
            self.abort()
            raise self.error("does not share memory", error) from error

    def broadcast(self, tensor: Tensor, sender: int) -> IpcCall:
        """Begin to send the trainer's tensor to all. Receivers take it when they wait.

        Raises:
            GroupError: another member has gone.
        """
        assert sender == SENDER
        try:
            return IpcCall(self, tensor)
        except RuntimeError as error:
            raise self.error("broke off", error) from error

    def abort(self) -> None:
        super().abort()
        self._open_reads, self._buffers = [[] for _ in range(_NUM_BUFFERS)], []
        for staging in self._own:
            staging.close()
        self._own = []

    def _share(self, buffer_bytes: int) -> None:
        receivers = range(1, self.num_ranks)
        if self.rank == SENDER:
            self._own = [Staging(buffer_bytes, self.device) for _ in range(_NUM_BUFFERS)]
            self._buffers = [staging.tensor for staging in self._own]
            for number, staging in enumerate(self._own):
                for receiver in receivers:
                    self._store.set(f"buffer {number} of {receiver}", staging.export())
        else:
            for number in range(_NUM_BUFFERS):
                description = self._store.get(f"buffer {number} of {self.rank}")
                self._buffers.append(import_staging(description, self.device))

    def _parts(self, tensor: Tensor) -> list[Tensor]:
        values = tensor.view(torch.uint8) if tensor.ndim else tensor.view(1).view(torch.uint8)
        return list(values.split(len(self._buffers[0])))

    def _write(self, tensor: Tensor) -> int:
        """Write a tensor into the buffers, each when all receivers have read what it had; return the number of parts so far."""
        for part in self._parts(tensor):
            number = self._num_parts % _NUM_BUFFERS
            self._await_reads(number)
            self._buffers[number][: len(part)].copy_(part, non_blocking=True)
            self._synchronize()
            for receiver in range(1, self.num_ranks):
                self._send_number(receiver, _WRITTEN)
                self._open_reads[number].append(self._receive_number(receiver, _READ))
            self._num_parts += 1
        return self._num_parts

    def _read(self, tensor: Tensor) -> None:
        for part in self._parts(tensor):
            number = self._num_parts % _NUM_BUFFERS
            self._receive_number(SENDER, _WRITTEN).wait(self._timeout)
            part.copy_(self._buffers[number][: len(part)], non_blocking=True)
            self._synchronize()
            self._send_number(SENDER, _READ)
            self._num_parts += 1

    def _await_reads(self, number: int) -> None:
        answers, self._open_reads[number] = self._open_reads[number], []
        for answer in answers:
            answer.wait(self._timeout)

    def _await_reads_of(self, num_parts: int) -> None:
        """Return when the receivers have read the first `num_parts` parts."""
        for number, answers in enumerate(self._open_reads):
            if answers and answers[0].expected < num_parts:
                self._await_reads(number)

    def _send_number(self, rank: int, tag: int) -> None:
        self._group.send([torch.tensor([self._num_parts])], rank, tag).wait(self._timeout)

    def _receive_number(self, rank: int, tag: int) -> _ExpectedNumber:
        value = torch.full((1,), -1)
        return _ExpectedNumber(self._group.recv([value], rank, tag), value, self._num_parts)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


@dataclass(frozen=True)
class _ExpectedNumber:
    """The number of a part, which another member will send."""

    work: Any
    value: Tensor
    expected: int

    def wait(self, timeout: timedelta) -> None:
        self.work.wait(timeout)
        if int(self.value) != self.expected:
            raise RuntimeError(f"part {int(self.value)} came in place of {self.expected}")


class IpcCall:
    """A message on its way. In the trainer its creation sends it."""

    def __init__(self, group: IpcGroup, tensor: Tensor) -> None:
        self._group, self._tensor = group, tensor
        self._num_parts = group._write(tensor) if group.rank == SENDER else 0

    def wait(self) -> None:
        """Return when every receiver has the message; in a receiver, when this one has it.

        Raises:
            GroupError: another member has gone, or the time is over.
        """
        try:
            if self._group.rank == SENDER:
                self._group._await_reads_of(self._num_parts)
            else:
                self._group._read(self._tensor)
        except RuntimeError as error:
            raise self._group.error("broke off", error) from error
