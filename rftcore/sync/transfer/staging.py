"""Memory that a trainer writes and engines on the same device read: exported by CUDA IPC on a GPU, as shared memory on a CPU.

Processes exchange a description of plain numbers and bytes as JSON. A pickle would let every process that reaches the group's store run code in
this one. torch counts each import of an export, so every process that imports gets a description of its own, and imports it once.
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

# Indices in torch's description of a CUDA tensor, from the storage's handle to the event.
_DEVICE, _FIRST, _LAST = 6, 7, 14


class Staging:
    """One buffer of the exporting process.

    Attributes:
        tensor: uint8.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._fd = -1
        if device.type == "cuda":
            self.tensor = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            return
        self._fd = os.memfd_create("weights")
        os.ftruncate(self._fd, num_bytes)
        self.tensor = _map_file(self._path, num_bytes)

    def export(self) -> str:
        """Return a description for one process that imports."""
        if self.tensor.device.type == "cpu":
            return json.dumps([self._path, len(self.tensor)])
        _, arguments = reduce_tensor(self.tensor)
        return json.dumps([_plain(each) for each in arguments[_FIRST:]] + [len(self.tensor)])

    def close(self) -> None:
        """Free the buffer, and imports of it that exited processes left behind."""
        is_on_gpu = self.tensor.device.type == "cuda"
        self.tensor = torch.empty(0, dtype=torch.uint8)
        if is_on_gpu:
            torch.cuda.ipc_collect()
        elif self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @property
    def _path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._fd}"


def import_staging(description: bytes | str, device: torch.device) -> Tensor:
    """Return another process's buffer, uint8, once for each description.

    Args:
        device: the device on which this process computes; it is the exporting process's, which may number it differently.

    Raises:
        OSError, RuntimeError: the buffer cannot be opened here.
    """
    fields = json.loads(description)
    if device.type == "cpu":
        path, num_bytes = fields
        return _map_file(path, num_bytes)
    *rest, num_bytes = fields
    storage: list[Any] = [_bytes(each) for each in rest]
    # (…, handle, size, offset, requires_grad, counter, its offset, event, whether to wait for it)
    tensor: Tensor = rebuild_cuda_tensor(
        Tensor, torch.Size([num_bytes]), (1,), 0, torch.storage.TypedStorage, torch.uint8, device.index, *storage
    )
    return tensor


def _map_file(path: str, num_bytes: int) -> Tensor:
    return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)


def _plain(value: Any) -> Any:
    return {"hex": value.hex()} if isinstance(value, bytes) else value


def _bytes(value: Any) -> Any:
    return bytes.fromhex(value["hex"]) if isinstance(value, dict) else value
