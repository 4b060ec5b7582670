"""Whole weights of a small model, and a file of them in the types that they have."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from rftcore.sync.weights_file import OUTPUT_HEAD, embedding_of, has_head


def complete_state(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return contiguous CPU tensors that share no memory, including the output head."""
    state: dict[str, Tensor] = {}
    seen_storage: set[int] = set()
    for name, tensor in tensors:
        on_cpu = tensor.detach().to("cpu").contiguous()
        storage = on_cpu.untyped_storage().data_ptr()
        state[name] = on_cpu.clone() if storage in seen_storage else on_cpu
        seen_storage.add(storage)
    if not has_head(state):
        state[OUTPUT_HEAD] = state[embedding_of(state)].clone()
    return state


def write_weights(tensors: Iterable[tuple[str, Tensor]], path: Path) -> None:
    """Write named tensors and the output head to `path`."""
    save_file(complete_state(tensors), path, metadata={"format": "pt"})
