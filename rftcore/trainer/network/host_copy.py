"""Tensors whose memory on a device is free while another process computes there: their contents wait in page-locked memory of the host.

The tensors stay the same objects: their storages lose their memory and get new memory later, as FSDP2 does with gathered weights. So optimizers, compiled
layers and sharded parameters, which refer to tensors or views of them, need not be told.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class HostCopy:
    """Keeps its memory in the host, so that only the first `leave` takes the time to lock pages."""

    def __init__(self) -> None:
        self._copies: dict[int, Tensor] = {}
        self._away: list[tuple[torch.UntypedStorage, Tensor]] = []

    def leave(self, tensors: Iterable[Tensor]) -> int:
        """Copy tensors to the host and free their memory; return the bytes. Nothing happens if they are away."""
        if self._away:
            return 0
        storages = {}
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if local.numel():
                storages[local.untyped_storage().data_ptr()] = local.untyped_storage()
        copies: dict[int, Tensor] = {}
        free = list(self._copies.values())
        devices = set()
        for number, storage in enumerate(storages.values()):
            old = free[number] if number < len(free) else None
            fits = old is not None and len(old) == storage.nbytes()
            on_gpu = storage.device.type == "cuda"
            copy = (
                old if fits and old is not None else torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=on_gpu)
            )
            copy.copy_(_bytes(storage), non_blocking=True)
            copies[number] = copy
            self._away.append((storage, copy))
            if on_gpu:
                devices.add(storage.device)
        for device in devices:
            torch.cuda.synchronize(device)
        for storage, _ in self._away:
            storage.resize_(0)
        self._copies = copies
        return sum(len(copy) for copy in copies.values())

    def come_back(self) -> None:
        """Give the tensors memory on their device, with their contents."""
        away, self._away = self._away, []
        for storage, copy in away:
            storage.resize_(len(copy))
            _bytes(storage).copy_(copy, non_blocking=True)
        if any(storage.device.type == "cuda" for storage, _ in away):
            torch.cuda.synchronize()


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
