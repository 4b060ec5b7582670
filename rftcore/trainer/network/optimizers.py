"""Optimizers and learning-rate schedules by name.

    adamw  torch.optim.AdamW, fused (arXiv 1711.05101)
    muon   torch.optim.Muon for the matrices of the layers, its update scaled to the RMS of AdamW's, so that one learning rate
           fits both (arXiv 2502.16982, section 2.2); AdamW for embeddings, the output layer and vectors

The learning rate is a function of the step alone, so there is no scheduler state to lose.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from rftcore.config.trainer import OptimizerConfig, TrainerConfig
from rftdata.errors import ModelError

# What each optimizer keeps of a parameter.
_STATE = {torch.optim.AdamW: {"step", "exp_avg", "exp_avg_sq"}, torch.optim.Muon: {"momentum_buffer"}}

# Attributes with the output layer of a model for token classification; a model has one of them.
VALUE_HEADS = ("score", "classifier")


def value_head(model: PreTrainedModel) -> nn.Module:
    """The layer that gives the value of a state.

    Raises:
        ModelError: the model has it under another name.
    """
    found = next((layer for name in VALUE_HEADS if isinstance(layer := getattr(model, name, None), nn.Linear)), None)
    if found is None:
        raise ModelError(
            "this family of models has no linear layer that could give values",
            value=model.config.model_type,
            todo="name a model of another family, such as llama or qwen3, in algorithm.critic.path, or use an algorithm without a critic",
        )
    return found


def build_optimizers(model: PreTrainedModel, config: OptimizerConfig, learning_rate: float) -> list[Optimizer]:
    """The optimizers of a model's parameters; each parameter that is trained belongs to exactly one."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    by_muon: list[Tensor] = []
    if config.name == "muon":
        others = _input_and_output(model)
        by_muon = [parameter for parameter in parameters if parameter.ndim == 2 and id(parameter) not in others]
    taken = {id(parameter) for parameter in by_muon}
    rest = [parameter for parameter in parameters if id(parameter) not in taken]
    optimizers: list[Optimizer] = []
    if by_muon:
        optimizers.append(
            torch.optim.Muon(
                by_muon,
                lr=learning_rate,
                momentum=config.momentum,
                weight_decay=config.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    groups = [
        {"params": [p for p in rest if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizers.append(torch.optim.AdamW(groups, lr=learning_rate, betas=config.betas, eps=config.eps, fused=True))
    return optimizers


def keeps(optimizer: Optimizer, keys: set[str]) -> bool:
    """Return whether an optimizer keeps state of these names of a parameter; of an optimizer that is not built in, it is not known."""
    return keys == _STATE.get(type(optimizer), keys)


def learning_rate_at(config: TrainerConfig, step: int, total_steps: int | None) -> float:
    """Learning rate of a step, as a share of the peak: a linear warm-up up to `warmup_steps`, then the schedule.

    Args:
        step: from 1.
        total_steps: length of the run; constant needs none.
    """
    if step < config.warmup_steps:
        return step / config.warmup_steps
    if config.lr_schedule == "constant" or total_steps is None:
        return 1.0
    first = config.warmup_steps
    if config.lr_schedule == "wsd":
        first = max(first, total_steps - round(config.lr_decay_ratio * total_steps))
    progress = min(1.0, max(0.0, (step - first) / max(1, total_steps - first)))
    share = 0.5 * (1.0 + math.cos(math.pi * progress)) if config.lr_schedule == "cosine" else 1.0 - progress
    return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * share


def _input_and_output(model: PreTrainedModel) -> set[int]:
    """Embeddings and the output layer, by the identity of their parameters."""
    layers: Sequence[nn.Module | None] = [model.get_input_embeddings(), model.get_output_embeddings()]
    layers = [*layers, *(getattr(model, name, None) for name in VALUE_HEADS)]
    return {id(parameter) for layer in layers if layer is not None for parameter in layer.parameters()}
