"""Asynchronous copies of tensors from the CPU to the device that trains."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to `device` without making the host wait.

    A copy to a GPU starts from pinned memory. From other memory CUDA stages the copy, and the host waits until all work launched before has
    ended (CUDA runtime API, "API synchronization behavior").
    """
    if device.type == "cuda" and tensor.device.type == "cpu" and tensor.numel():
        tensor = tensor.pin_memory()  # torch keeps it until the copy has ended
    return tensor.to(device, non_blocking=True)
