"""`HostCopy`: the contents of tensors in page-locked memory of the host, while another process uses their memory on the device.

The tensors stay the same objects: their storages lose their memory and get new memory later, as FSDP2 does with gathered weights. So the references of
optimizers, compiled layers and sharded parameters to tensors and their views stay valid.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class HostCopy:
    """A copy that keeps its memory on the host, so that only the first `leave` takes the time to lock pages."""

    def __init__(self) -> None:
        self._copies: dict[int, Tensor] = {}
        self._away: list[tuple[torch.UntypedStorage, Tensor]] = []

    def leave(self, tensors: Iterable[Tensor]) -> int:
        """Copy tensors to the host and free their memory; return the bytes. If they are on the host already, do nothing."""
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
        """Copy the contents back to new memory on the tensors' device."""
        away, self._away = self._away, []
        for storage, copy in away:
            storage.resize_(len(copy))
            _bytes(storage).copy_(copy, non_blocking=True)
        if any(storage.device.type == "cuda" for storage, _ in away):
            torch.cuda.synchronize()


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
