"""Names of devices that are the same in every process, and the communication backend that follows from them.

Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def device_id(device: str) -> str:
    """Return the id of a GPU, which does not depend on the devices that a process may see; `cpu` for the CPU."""
    if device == "cpu":
        return device
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)


def torch_device(device: str | torch.device | None = None) -> torch.device:
    """Return a device with its number: by default the CUDA device of this process where there is one, else the CPU."""
    import torch

    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return torch.device("cuda", torch.cuda.current_device()) if str(chosen) == "cuda" else chosen


def own_device() -> str:
    """Return the id of the device on which a role of one GPU computes."""
    import torch

    return device_id("cuda:0" if torch.cuda.is_available() else "cpu")


def choose_backend(trainer: str, engines: Sequence[str]) -> tuple[str, str]:
    """Return nccl, ipc or gloo for the devices of a trainer and of engines, and the reason.

    Args:
        trainer: devices of the trainer's processes, with commas.
        engines: devices of each engine's processes, with commas.
    """
    devices = [device for member in (trainer, *engines) for device in member.split(",")]
    if "cpu" in devices:
        return "gloo", "not all of trainer and engines have GPUs"
    if len(set(devices)) == 1:
        return "ipc", "trainer and engine share a GPU"
    if len(set(devices)) < len(devices):
        return "gloo", "trainer and engines share a GPU, which NCCL refuses"
    return "nccl", f"trainer and engines have {len(devices)} GPUs of their own"
