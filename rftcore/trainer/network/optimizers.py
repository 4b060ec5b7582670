"""Optimizers of a network, and learning-rate schedules, by name.

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
from rftdata.errors import ConfigError, ModelError

# Names of the state that each optimizer keeps for a parameter.
_STATE = {torch.optim.AdamW: {"step", "exp_avg", "exp_avg_sq"}, torch.optim.Muon: {"momentum_buffer"}}

# Attributes that may hold the output layer of a model for token classification.
VALUE_HEADS = ("score", "classifier")


def value_head(model: PreTrainedModel) -> nn.Module:
    """Return the layer that computes the value of a state.

    Raises:
        ModelError: the model has no such layer under a known name.
    """
    head = next((layer for name in VALUE_HEADS if isinstance(layer := getattr(model, name, None), nn.Linear)), None)
    if head is None:
        raise ModelError(
            "this family of models has no linear layer that could give values",
            value=model.config.model_type,
            todo="name a model of another family, such as llama or qwen3, in algorithm.critic.path, or use an algorithm without a critic",
        )
    return head


class Optimizers:
    """The optimizers of a network: each parameter that is trained belongs to exactly one.

    Args:
        learning_rate: peak; None for a model that is not trained, which has no optimizer.

    Attributes:
        members: with Muon its optimizer of matrices first.
    """

    def __init__(self, model: PreTrainedModel, config: OptimizerConfig, learning_rate: float | None) -> None:
        self._model = model
        self._config = config
        self._learning_rate = learning_rate or 0.0
        self.members = [] if learning_rate is None else _build(model, config, learning_rate)

    def step(self, share: float) -> None:
        """Update the parameters from their gradients.

        Args:
            share: of the peak learning rate.
        """
        for optimizer in self.members:
            for group in optimizer.param_groups:
                group["lr"] = share * self._learning_rate
            optimizer.step()

    def clear_gradients(self) -> None:
        for optimizer in self.members:
            optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Return every tensor of the optimizers, as `parameter/key`; of a sharded tensor, the shard of this rank."""
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        return {
            f"{names[id(parameter)]}/{key}": value
            for optimizer in self.members
            for parameter, state in optimizer.state.items()
            for key, value in state.items()
        }

    def empty_state(self, sizes: dict[str, torch.Size]) -> dict[str, Tensor]:
        """Return tensors for `state` of these names and sizes, sharded as the parameters are now, to read a checkpoint into.

        With `optimizer.on_change: reset`, the state of parameters that another optimizer updated is left out.

        Raises:
            ModelError: the state belongs to a parameter that the model does not have.
            ConfigError: another optimizer wrote it.
        """
        parameters, owners = dict(self._model.named_parameters()), self._owners()
        keys_of: dict[str, set[str]] = {}
        for key in sizes:
            name, _, part = key.rpartition("/")
            if name not in parameters:
                raise ModelError(f"the checkpoint has optimizer state for {name!r}, which its model lacks")
            keys_of.setdefault(name, set()).add(part)
        others = {name for name, keys in keys_of.items() if not _keeps(owners[id(parameters[name])], keys)}
        if others and self._config.on_change == "refuse":
            raise ConfigError(
                f"the checkpoint has moments of another optimizer for {len(others)} of {len(keys_of)} parameters",
                value=f"trainer.optimizer.name: {self._config.name}",
                allowed="the optimizer that the run has had until now",
                todo="change it back, or begin those moments at 0: trainer.optimizer.on_change: reset",
            )
        tensors: dict[str, Tensor] = {}
        for key, size in sizes.items():
            name = key.rpartition("/")[0]
            if name not in others:
                parameter = parameters[name]
                tensors[key] = torch.zeros_like(parameter) if parameter.shape == size else torch.zeros(size)
        return tensors

    def load_state(self, tensors: dict[str, Tensor], device: torch.device) -> None:
        """Take over what `state` returned, on this device."""
        parameters, owners = dict(self._model.named_parameters()), self._owners()
        for key, tensor in tensors.items():
            name, _, part = key.rpartition("/")
            parameter = parameters[name]
            owners[id(parameter)].state[parameter][part] = tensor.to(device)

    def _owners(self) -> dict[int, Optimizer]:
        """Return the optimizer of each parameter, by the parameter's identity."""
        return {
            id(parameter): optimizer
            for optimizer in self.members
            for group in optimizer.param_groups
            for parameter in group["params"]
        }


def _build(model: PreTrainedModel, config: OptimizerConfig, learning_rate: float) -> list[Optimizer]:
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


def _keeps(optimizer: Optimizer, keys: set[str]) -> bool:
    """Return whether an optimizer keeps state of these names for a parameter; True for an optimizer that is not built in, since its names are unknown."""
    return keys == _STATE.get(type(optimizer), keys)


def learning_rate_at(config: TrainerConfig, step: int, total_steps: int | None) -> float:
    """Return the learning rate of a step, as a share of the peak: a linear warm-up up to `warmup_steps`, then the schedule.

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
    """Return the identities of the parameters of the embeddings and the output layer."""
    layers: Sequence[nn.Module | None] = [model.get_input_embeddings(), model.get_output_embeddings()]
    layers = [*layers, *(getattr(model, name, None) for name in VALUE_HEADS)]
    return {id(parameter) for layer in layers if layer is not None for parameter in layer.parameters()}
