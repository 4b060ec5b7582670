"""Low-rank adapters by peft (arXiv 2106.09685), beside the linear layers of a model whose own weights stay as they are.

Adapters are small, so every rank has them whole, in float32, and their gradients are added up by hand. The model's own weights are sharded, in
bfloat16 on a GPU. Engines get the adapters alone, or merged weights, W + alpha / rank · B A. A checkpoint has merged weights in float32, so that small
updates are not rounded away, and the adapters beside them in peft's format.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rftcore.config.trainer import LoraConfig
from rftcore.sync.files.adapters_file import PREFIX
from rftcore.trainer.network.weight_parts import first_row
from rftdata.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from peft import LoraConfig as PeftConfig

_FILE = "adapter_model.safetensors"
_NAME = "default"  # of the adapter in peft's modules


def named_layers(model: PreTrainedModel, config: LoraConfig, stacked: Collection[str]) -> LoraConfig:
    """Replace `all-linear` by names of layers where the model has experts, which have no adapter: peft would add adapters to them.

    Args:
        stacked: names of the matrices of experts (`CheckpointLayout.stacked`). A linear layer of the same name has no adapter, either.

    Raises:
        ConfigError: it names matrices of experts.
    """
    if not stacked:
        return config
    output = model.get_output_embeddings()
    linear = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not output
    }
    others = sorted(linear.difference(stacked))
    if config.target_modules == "all-linear":
        return config.model_copy(update={"target_modules": others})
    if refused := [name for name in config.target_modules if name.rpartition(".")[2] in stacked]:
        raise ConfigError(
            "trainer.lora.target_modules names experts, which can have no adapter",
            value=refused,
            allowed=f"all-linear, or a list of {', '.join(others)}",
            todo="remove them, or leave trainer.lora out and train all weights",
        )
    return config


def add_adapters(model: PreTrainedModel, config: LoraConfig) -> list[nn.Parameter]:
    """Add adapters to the layers that `config` names, and freeze all other weights.

    Returns:
        The adapters' parameters, float32; B is 0.

    Raises:
        ConfigError: the model has no such layer.
    """
    from peft import inject_adapter_in_model

    try:
        inject_adapter_in_model(_peft_config(config), model)
    except ValueError as error:
        linear = sorted(
            {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        )
        raise ConfigError(
            "trainer.lora.target_modules names no layer of the model",
            value=config.target_modules,
            allowed=", ".join(linear),
            todo="name some of these, or all-linear",
        ) from error
    _refuse_outside_layers(model, config)
    adapters = [parameter for name, parameter in model.named_parameters() if ".lora_" in name]
    for parameter in adapters:
        parameter.data = parameter.data.float()
    return adapters


def _refuse_outside_layers(model: PreTrainedModel, config: LoraConfig) -> None:
    """Raise a ConfigError if the output layer has an adapter, which logits would ignore, or a module that is no matrix [outputs, inputs]."""
    from peft.tuners.lora.layer import LoraLayer

    output = model.get_output_embeddings()
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer) and (module is output or not isinstance(module.get_base_layer(), nn.Linear)):
            raise ConfigError(
                "trainer.lora.target_modules names a module that can have no adapter",
                value=name,
                allowed="linear layers of the model's blocks",
                todo=f"remove it from {config.target_modules}, or name q_proj, v_proj and the like",
            )


def merged(model: PreTrainedModel, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the model's weights with the adapters merged in, in float32, by their names in the model without adapters; sharded as the model is.

    Args:
        state: state dict of the model with adapters.
    """
    from peft.tuners.lora.layer import LoraLayer

    layers: dict[str, Any] = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    for name, tensor in state.items():
        if ".lora_" in name:
            continue
        layer = name.removesuffix(".base_layer.weight")
        weight = _with_adapter(tensor.detach(), layers[layer]) if layer in layers else tensor.detach()
        yield name.replace(".base_layer.", "."), weight


def _with_adapter(weight: Tensor, layer: Any) -> Tensor:
    own, delta = _own_rows(weight, layer)
    summed: Tensor = own.float() + delta
    if not isinstance(weight, DTensor):
        return summed
    return DTensor.from_local(
        summed, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )


def _own_rows(weight: Tensor, layer: Any) -> tuple[Tensor, Tensor]:
    """Return the rows of W that this rank has, and those of alpha / rank · B A, float32."""
    a_RI, b_OR = (layer.get_submodule(part).get_parameter(f"{_NAME}.weight").detach() for part in ("lora_A", "lora_B"))
    own, first = (weight.to_local(), first_row(weight)) if isinstance(weight, DTensor) else (weight, 0)
    return own, layer.scaling[_NAME] * (b_OR[first : first + len(own)] @ a_RI)


def merged_update_error(model: PreTrainedModel, dtype: torch.dtype) -> float:
    """Return the share of the adapters' update that merged weights of this type lose: |round(W + D) - W - D| / |D|, D = alpha / rank · B A.

    Frobenius norms over the rows that this rank has, of all adapted layers together; 0 where the adapters are 0. W is rounded, as engines have it.
    """
    from peft.tuners.lora.layer import LoraLayer

    device = next(model.parameters()).device
    lost, whole = (torch.zeros((), device=device, dtype=torch.float64) for _ in range(2))
    layers: list[Any] = [module for module in model.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        weight, delta = _own_rows(layer.get_base_layer().weight.detach(), layer)
        rounded = weight.to(dtype).float()
        merged_delta = (weight.float() + delta).to(dtype).float() - rounded
        lost += (merged_delta - delta).square().sum().double()
        whole += delta.square().sum().double()
    return (lost / whole).sqrt().item() if whole > 0 else 0.0


@contextmanager
def without_adapters(model: PreTrainedModel) -> Iterator[None]:
    """Switch the adapters off for the block."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


@contextmanager
def without_dropout(model: PreTrainedModel) -> Iterator[None]:
    """Switch the dropout of adapters off for the block; the model itself has none."""
    layers = [module for module in model.modules() if isinstance(module, nn.Dropout) and module.training]
    for layer in layers:
        layer.train(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.train(True)


def named_adapters(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the adapters by peft's names, without copies; every rank has them whole."""
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            yield PREFIX + name.replace(f".{_NAME}.", "."), parameter.detach()


def adapter_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return copies of the adapters in the host's memory, by peft's names."""
    return {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in named_adapters(model)}


def save_adapters(tensors: dict[str, Tensor], config: LoraConfig, folder: Path) -> None:
    """Write `adapter_tensors` in peft's format: `PeftModel.from_pretrained(base, folder)` opens them."""
    folder.mkdir(parents=True)
    save_file(tensors, folder / _FILE)
    _peft_config(config).save_pretrained(str(folder))


def stored_adapters(folder: Path) -> dict[str, Tensor]:
    """Return the tensors that `save_adapters` wrote; none for a folder without adapters."""
    return load_file(folder / _FILE) if folder.is_dir() else {}


def adapters_json(config: LoraConfig) -> dict[str, Any]:
    """Return the contents of peft's adapter_config.json."""
    values = _peft_config(config).to_dict()  # type: ignore[no-untyped-call]
    return {key: sorted(value) if isinstance(value, set) else value for key, value in values.items()}


def load_adapters(model: PreTrainedModel, folder: Path) -> None:
    """Read the tensors that `save_adapters` wrote into the model's adapters.

    Raises:
        ModelError: there are no adapters, or those of another model or rank.
    """
    own = dict(named_adapters(model))
    try:
        tensors = load_file(folder / _FILE)
    except OSError as error:
        raise ModelError(
            f"the checkpoint {folder.parent} has no adapters: {error}",
            todo="resume with the trainer.lora that the run began with, or start a new run with the checkpoint as model.path",
        ) from error
    shapes, expected = ({name: tuple(t.shape) for name, t in named.items()} for named in (tensors, own))
    if shapes != expected:
        name = min(name for name in {*shapes, *expected} if shapes.get(name) != expected.get(name))
        raise ModelError(
            f"the checkpoint {folder.parent} has other adapters than trainer.lora asks for: {name}",
            value=shapes.get(name, "none"),
            allowed=str(expected.get(name, "none")),
            todo="resume with the trainer.lora that the run began with",
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(tensors[name])


def _peft_config(config: LoraConfig) -> PeftConfig:
    from peft import LoraConfig as Config

    return Config(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=config.target_modules,
        task_type="CAUSAL_LM",
    )
