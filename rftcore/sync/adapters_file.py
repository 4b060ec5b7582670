"""Adapters as one safetensors file in place of whole weights (`sync.adapters: alone`): megabytes where the model has gigabytes.

The file has the adapters' tensors under peft's names, and peft's configuration in its header. An engine keeps the weights of the model that the run
began with, which are in its own folder, and takes the file beside or into them. A file without tensors is that model itself.

Importing this module does not import torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rftcore.sync.transfer_plan import AdaptersConfig
from rftcore.sync.weights_file import iterate_weights, read_metadata
from rftdata.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

PREFIX = "base_model.model."  # of names in peft's files
ADAPTERS_NAME, ADAPTERS_ID = "policy", 1  # in vLLM
_KEY = "adapters"
_A, _B = ".lora_A.weight", ".lora_B.weight"


def write_adapters(tensors: Mapping[str, Tensor], config: Mapping[str, Any], path: Path) -> None:
    """Write adapters to `path`; the caller renames the file.

    Args:
        tensors: by peft's names; none for the model without adapters.
        config: the contents of peft's adapter_config.json.
    """
    from safetensors.torch import save_file

    save_file(dict(tensors), path, metadata={"format": "pt", _KEY: json.dumps(config)})


def adapters_config(path: Path) -> AdaptersConfig | None:
    """Return peft's configuration of a file of adapters; None for a file of whole weights."""
    found = read_metadata(path).get(_KEY)
    return None if found is None else dict(json.loads(found))


def refuse_unfit_adapters(
    found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], what: str
) -> None:  # fmt: skip
    """Refuse adapters of another model.

    Args:
        found: shapes of the adapters.
        expected: shapes of the model's own checkpoint.
        what: the adapters, for the message.

    Raises:
        ModelError: a matrix has no adapter of its size, or half an adapter.
    """
    layers = {name.removesuffix(_A).removesuffix(_B) for name in found}
    for layer in sorted(layers):
        a, b = found.get(layer + _A, ()), found.get(layer + _B, ())
        weight = expected.get(layer.removeprefix(PREFIX) + ".weight", ())
        if len(a) != 2 or len(b) != 2 or a[0] != b[1] or (b[0], a[1]) != weight:
            raise ModelError(
                f"{what} do not fit the model in the engine: {layer}", value=(a, b), allowed=f"A and B of a matrix {weight}",
                todo="start the engine with the model.path that the trainer began with",
            )  # fmt: skip


def whole_weights(path: Path, folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight that a file stands for: what it contains, or the model in `folder` with the adapters merged into it."""
    config = adapters_config(path)
    if config is None:
        yield from iterate_weights(path)
    else:
        yield from merged_weights(dict(iterate_weights(path)), config, folder)


def merged_weights(
    adapters: Mapping[str, Tensor], config: AdaptersConfig, folder: Path
) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight of the model in `folder` with adapters merged into it.

    The values are those that the trainer exports: W + alpha / rank · B A in float32, in the type of W.
    """
    scaling = config["lora_alpha"] / config["r"]
    for file in sorted(folder.glob("*.safetensors")):
        for name, weight in iterate_weights(file):
            layer = PREFIX + name.removesuffix(".weight")
            if layer + _B in adapters:
                delta = scaling * (adapters[layer + _B].float() @ adapters[layer + _A].float())
                yield name, (weight.float() + delta).to(weight.dtype)
            else:
                yield name, weight
