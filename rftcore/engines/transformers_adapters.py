"""Adapters beside the linear layers of a transformers model, without peft: y = W x + alpha / rank · B (A x), the second term in float32.

They are replaced while the model is in use, between two batches. The model's own weights never change.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from rftcore.sync.files.adapters_file import PREFIX, A, B
from rftcore.sync.tensors import AdaptersConfig


class AdaptersBeside:
    """The adapters of one model.

    Attributes:
        tensors: by peft's names, float32, on the model's device; empty if the model has none.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._hooks: list[Any] = []
        self.tensors: dict[str, Tensor] = {}

    def replace(self, tensors: Mapping[str, Tensor], config: AdaptersConfig) -> None:
        """Replace the model's adapters; without tensors it has none.

        Args:
            tensors: by peft's names, A [rank, inputs] and B [outputs, rank]; they fit the model.
            config: peft's configuration.
        """
        for hook in self._hooks:
            hook.remove()
        device = next(self._model.parameters()).device
        self.tensors = {name: tensor.to(device, torch.float32, copy=True) for name, tensor in tensors.items()}
        scaling = config["lora_alpha"] / config["r"]
        self._hooks = [
            self._model.get_submodule(name.removeprefix(PREFIX).removesuffix(A)).register_forward_hook(
                partial(_add, a_RI, self.tensors[name.removesuffix(A) + B], scaling)
            )
            for name, a_RI in self.tensors.items()
            if name.endswith(A)
        ]


def _add(
    a_RI: Tensor, b_OR: Tensor, scaling: float, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor
) -> Tensor:
    del layer
    delta = scaling * linear(linear(inputs[0].float(), a_RI), b_OR)
    return (output.float() + delta).to(output.dtype)
