"""Whole weights of a small model, and a file of them in the types that they have."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from rftcore.sync.files.weights_file import OUTPUT_HEAD, embedding_of, has_head
from rftcore.sync.files.weights_stream import begin_file, layout
from rftcore.sync.tensors import shapes_of
from rftcore.trainer.learner import Learner
from rftcore.trainer.processes.learner_group import LearnerGroup


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


def weights_of(learner: Learner | LearnerGroup) -> dict[str, Tensor]:
    """Return the whole weights of a learner in float32, by way of a file as engines get it. All ranks of a `Learner` call it."""
    tensors = learner.weight_tensors() if isinstance(learner, LearnerGroup) else learner.wire_tensors()
    with tempfile.TemporaryDirectory() as folder:
        places, path = layout(dict(shapes_of(tensors)), "float32"), Path(folder) / "weights.safetensors"
        if isinstance(learner, LearnerGroup):
            learner.write_weights(places, tensors, path)
            return load_file(path)
        grid, paths = learner.grid, [path]
        if grid.mesh is not None:
            dist.broadcast_object_list(paths)
        if grid.is_first:
            begin_file(places, path)
        grid.wait_for_all()
        learner.write_weights(places, tensors, paths[0])
        grid.wait_for_all()
        found = load_file(paths[0])
        grid.wait_for_all()
    return found
