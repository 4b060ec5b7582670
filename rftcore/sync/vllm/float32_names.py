"""Which weights a vLLM worker keeps in float32 although the model's type is another, such as the bias of a router or the decay of a linear attention.

A checkpoint's tensor is not one of vLLM's parameters: loaders rename, fuse and divide them. So the model's own loader is asked. It gets every name once,
with tensors without storage, and the parameters record which names they are given instead of loading them. That runs within vLLM's layerwise reload,
which holds the parameters in the form of the checkpoint, and puts the running ones back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from rftcore.sync.tensors import TensorShapes

logger = logging.getLogger(__name__)


def names_in_float32(model: nn.Module, model_config: Any, checkpoint: TensorShapes) -> list[str]:
    """Return the names of a checkpoint's tensors that the model keeps in float32, and of those whose type is unknown.

    A tensor that is sent in float32 although the model keeps it in another type costs time only: loading rounds it.

    Args:
        checkpoint: names and shapes of its tensors.
    """
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    if model_config.dtype == torch.float32 or not _has_float32(model):
        return []
    initialize_layerwise_reload(model)
    try:
        types = _types(model, checkpoint)
    except Exception as error:  # noqa: BLE001 - of a loader that computes with what it loads
        logger.warning("all weights are sent in float32: the model's loader does not tell what it loads: %s", error)
        types = {}
    finally:
        end_reload(model, model_config)
    return [name for name, _ in checkpoint if torch.float32 in types.get(name, {torch.float32})]


def end_reload(model: nn.Module, model_config: Any) -> None:
    """End a layerwise reload: layers that are not complete get their old tensors back."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            info.loaded_weights.clear()
            info.load_numel = 0
    finalize_layerwise_reload(model, model_config)  # type: ignore[no-untyped-call]


def _has_float32(model: nn.Module) -> bool:
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    # vLLM may keep another type than it loads, and leaves some parameters out of its reload.
    as_loaded = (get_layerwise_info(layer).restore_metadata[0].values() for layer in model.modules())
    return any(tensor.dtype == torch.float32 for tensor in chain(model.parameters(), *as_loaded))


def _types(model: nn.Module, checkpoint: TensorShapes) -> dict[str, set[torch.dtype]]:
    """Return the types of the parameters that each of a checkpoint's tensors is loaded into."""
    types: dict[str, set[torch.dtype]] = {}
    current = ""

    def recorder(dtype: torch.dtype) -> Callable[..., bool]:
        def record(*_: object, **__: object) -> bool:
            types.setdefault(current, set()).add(dtype)
            return True

        return record

    def tensors() -> Iterator[tuple[str, Tensor]]:
        nonlocal current
        for current, shape in checkpoint:
            yield current, torch.empty(shape, device="meta")

    # The parameters are those of every later reload, too.
    own = [(parameter, dict(parameter.__dict__)) for parameter in model.parameters()]
    try:
        for parameter, _ in own:
            parameter.weight_loader = recorder(parameter.dtype)  # type: ignore[attr-defined]
        model.load_weights(tensors())  # type: ignore[operator]
    finally:
        for parameter, attributes in own:
            parameter.__dict__.clear()
            parameter.__dict__.update(attributes)
    return types
