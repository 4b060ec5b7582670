"""Opening a transformer for the trainer: with attention over packed sequences, with its head, and without dropout."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification, PreTrainedModel

from rftcore.config.trainer import TrainerConfig
from rftcore.sync.files.weights_file import read_types_of_model
from rftcore.trainer.model_shape import refuse_indivisible
from rftcore.trainer.network import attention, packable
from rftcore.trainer.network.optimizers import value_head
from rftcore.trainer.network.sharding import Grid
from rftcore.trainer.network.stacked_weights import Unread, has_lists_in_layers, open_stacked
from rftcore.whole_models import opening, refuse_missing

Head = Literal["vocabulary", "value"]
# Files of several types, or in another format, are read in the trainer's type.
_STORED = {frozenset({"F32"}): "float32", frozenset({"BF16"}): "bfloat16", frozenset({"F16"}): "float16"}


def opened_model(path: str, config: TrainerConfig, grid: Grid, head: Head) -> tuple[PreTrainedModel, Unread]:
    """Open the model in a folder, in the type in which it is stored: its weights are the mapped files, which all ranks of a host share.

    `rftcore.trainer.network.sharding.shard` converts them to the trainer's type, layer by layer, and reads those that are still in the files, such as experts.

    Raises:
        ModelError: the folder has no model, or not all of its weights.
        ConfigError: its attention cannot be packed, its layers cannot be divided over the ranks, or it has another head.
    """
    dtype = _STORED.get(frozenset(read_types_of_model(Path(path))), config.dtype)
    options: dict[str, Any] = {"dtype": getattr(torch, dtype), "attn_implementation": attention.NAME}
    kind: Any = AutoModelForCausalLM if head == "vocabulary" else AutoModelForTokenClassification
    unread: Unread = {}
    with opening(path):
        model_config = AutoConfig.from_pretrained(path, **({} if head == "vocabulary" else {"num_labels": 1}))
        packable.refuse_unpackable(model_config)
        if grid.num_tensor_ranks > 1:
            refuse_indivisible(model_config.to_dict(), grid.num_tensor_ranks)
        model: PreTrainedModel
        # transformers' own conversion of quantised weights needs all of their parts.
        is_quantised = getattr(model_config, "quantization_config", None) is not None
        if not is_quantised and has_lists_in_layers(Path(path)):
            make = partial(kind.from_config, model_config, **options)
            model, unread, missing = open_stacked(Path(path), make, options["dtype"])
        else:
            model, report = kind.from_pretrained(path, config=model_config, output_loading_info=True, **options)
            missing = report["missing_keys"]
    # A model without a value head gets a new one; a critic that was trained before has one.
    has_head = head == "vocabulary" or any(
        name.endswith("ForTokenClassification") for name in model_config.architectures or ()
    )
    refuse_missing(path, (name for name in missing if has_head or name.startswith(f"{model.base_model_prefix}.")))
    # Dropout stays off: the ratio has to compare two policies, not two draws of noise.
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0  # type: ignore[assignment]  # torch takes every attribute for a tensor
    if head == "value":
        value_head(model)
    else:
        refuse_other_head(model)
    return model, unread


def refuse_other_head(model: PreTrainedModel) -> None:
    """Raise a ConfigError if logits are more than the output layer's products with the last hidden states (BERT's transform)."""
    computed = (model.base_model, model.get_output_embeddings())
    others = [
        name
        for name, module in model.named_children()
        if module not in computed and any(True for _ in module.parameters())
    ]
    if others:
        raise packable.unpackable(
            f"it has layers between the last hidden states and the logits ({', '.join(others)})", model.config
        )
