"""Compare the weights in a running vLLM worker with a model that vLLM loads anew from a folder (`sync.check_weights`).

The second model goes through vLLM's first loading, not through the reload that changes weights in place, so that a fault of the reload shows: a layer
that keeps prepacked weights, a tied head that stays old, a tensor that is never loaded. Tensors are compared by 64-bit hashes of their bytes
in the form in which kernels read them. On a CPU, prepacked weights cannot be read at all. Such a layer is compared by what it computes from
fixed inputs, with the same kernel and therefore bit by bit.

Adapters alone are compared in the memory of vLLM's kernels, before and after vLLM has read them from a folder.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rftcore.sync.transfer.hashes import hashes_of
from rftcore.sync.transfer.plan import BLOCK_BYTES
from rftcore.sync.vllm.adapters import adapter_memory, load_adapters_folder

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_ROWS = 4  # of the inputs of prepacked layers


def differing_tensors(model: nn.Module, config: VllmConfig, folder: str) -> list[str]:
    """Return the names of the tensors of a loaded model that differ from those of one loaded from `folder`, this worker's part of them.

    Args:
        config: the worker's.
    """
    running, expected = _contents(model), _contents(_load(config, folder))
    return sorted(name for name in running.keys() | expected.keys() if running.get(name) != expected.get(name))


def differing_adapters(worker: Any, folder: str) -> list[str]:
    """Return the parts of a worker's adapters that differ from those that vLLM reads from `folder`. The worker has the latter afterwards."""
    model = worker.model_runner.get_model()
    before = {name: int(_hash(tensor)) for name, tensor in adapter_memory(model)}
    load_adapters_folder(worker, folder)
    return sorted(name for name, tensor in adapter_memory(model) if before[name] != int(_hash(tensor)))


def _load(config: VllmConfig, folder: str) -> nn.Module:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model

    # Layers register themselves by name in a table. This model gets another one, so that those of the running model stay.
    own = copy.copy(config)
    own.compilation_config = copy.copy(config.compilation_config)
    own.compilation_config.static_forward_context = {}
    own.compilation_config.static_all_moe_layers = []
    own.model_config = copy.copy(config.model_config)
    own.model_config.model = folder
    own.model_config.model_weights = ""
    own.model_config.revision = None
    with set_current_vllm_config(own):
        return get_model(vllm_config=own)


@torch.no_grad()
def _contents(model: nn.Module) -> dict[str, int]:
    """Return a hash for every tensor of a model, by name."""
    hashes = {name: _hash(tensor) for name, tensor in _tensors(model)}
    return {name: int(hash_) for name, hash_ in hashes.items()}


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    ):
        yield _without_wrapper(name), tensor
    for name, layer in model.named_modules():
        if hasattr(layer, "cpu_linear"):
            yield f"{_without_wrapper(name + '.weight')}, prepacked", _computed(layer)


def _without_wrapper(name: str) -> str:
    """Return the name of a tensor in a model without room for adapters."""
    return name.replace(".base_layer.", ".")


def _computed(layer: Any) -> Tensor:
    """Return what a prepacked layer computes from fixed inputs, [4, outputs]."""
    if layer.weight.ndim == 2:
        width = layer.weight.shape[1]
    else:  # a layer that every process has whole, as a router, has no partitions
        width = getattr(layer, "input_size_per_partition", None) or layer.input_size
    inputs = torch.randn(_ROWS, width, generator=torch.Generator().manual_seed(0)).to(layer.weight.dtype)
    computed: Tensor = layer.cpu_linear(inputs, layer.weight, None)
    return computed


def _hash(tensor: Tensor) -> Tensor:
    """Return a 64-bit hash of a tensor's bytes, on its device."""
    content = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    packed = content.new_zeros(-(-len(content) // BLOCK_BYTES) * BLOCK_BYTES)
    packed[: len(content)] = content
    return hashes_of(packed, [(0, len(content))])[0]
