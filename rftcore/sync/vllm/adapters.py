"""Adapters beside the weights of a vLLM worker (`sync.adapters: alone`): from tensors that the trainer sends, or from a folder in peft's format.

vLLM reads adapters from folders only. What it does with them afterwards is done here with tensors, by the same methods: `LoRAModel.from_lora_tensors`
gives them vLLM's names, and the adapter manager packs them (q, k and v as one) and copies them into the memory that its kernels read.
They are one adapter with a fixed number, replaced in place, so that requests that run go on with the new ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from rftcore.sync.files.adapters_file import ADAPTERS_ID, ADAPTERS_NAME
from rftcore.sync.tensors import AdaptersConfig
from rftdata.errors import ModelError


def load_adapters(worker_manager: Any, tensors: dict[str, Tensor], config: AdaptersConfig) -> None:
    """Put adapters in place of those that a worker has.

    Args:
        worker_manager: vLLM's WorkerLoRAManager.
        tensors: by peft's names, on any device. vLLM keeps and changes them.

    Raises:
        ModelError: vLLM computes no adapters of such a layer; the old ones are in place.
    """
    manager = worker_manager._adapter_manager
    adapters = _adapters(worker_manager, tensors, config)
    packed = (part for parts in manager.packed_modules.values() for part in parts)
    if unknown := sorted(adapters.loras.keys() - {*manager.modules, *packed}):
        raise ModelError(
            "vLLM computes no adapters of some layers",
            value=", ".join(unknown[:3]),
            allowed=", ".join(sorted(manager.supported_lora_modules)),
            todo="name others in trainer.lora.target_modules, or set sync.adapters: merged",
        )
    manager.remove_adapter(ADAPTERS_ID)
    manager.add_adapter(adapters)
    manager.activate_adapter(ADAPTERS_ID)


def load_adapters_folder(worker: Any, folder: str) -> None:
    """Put the adapters of a folder in place of those that a worker has."""
    from vllm.lora.request import LoRARequest

    worker.add_lora(LoRARequest(ADAPTERS_NAME, ADAPTERS_ID, folder, load_inplace=True))


def adapter_memory(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the memory that vLLM's kernels read adapters from, by layer and part."""
    from vllm.lora.layers import BaseLayerWithLoRA

    for name, layer in model.named_modules():
        if isinstance(layer, BaseLayerWithLoRA):
            for part in ("lora_a_stacked", "lora_b_stacked"):
                for number, tensor in enumerate(getattr(layer, part, ())):
                    yield f"{name}.{part}.{number}", tensor


def _adapters(worker_manager: Any, tensors: dict[str, Tensor], config: AdaptersConfig) -> Any:
    from vllm.lora.peft_helper import PEFTHelper

    helper = PEFTHelper.from_dict({**config, "vllm_max_position_embeddings": worker_manager.max_position_embeddings})
    helper.validate_legal(worker_manager.lora_config)
    mapper = getattr(worker_manager._adapter_manager.model, "hf_to_vllm_mapper", None)
    return worker_manager._lora_model_cls.from_lora_tensors(
        lora_model_id=ADAPTERS_ID,
        tensors=tensors,
        peft_helper=helper,
        device=str(next(iter(tensors.values())).device),
        dtype=worker_manager.lora_config.lora_dtype,
        model_vocab_size=worker_manager.vocab_size,
        weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
    )
