"""Adapters as one safetensors file in place of whole weights (`sync.adapters: alone`): megabytes where the model has gigabytes.

The file has the adapters' tensors under peft's names, and peft's configuration in its header. An engine keeps the weights of the model that the run
began with, which are in its own folder, and computes the file's beside them. A file without tensors is that model itself.

Importing this module does not import torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rftcore.sync.files.weights_file import read_metadata
from rftcore.sync.tensors import AdaptersConfig
from rftdata.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

PREFIX = "base_model.model."  # of names in peft's files
ADAPTERS_NAME, ADAPTERS_ID = "policy", 1  # in vLLM
_KEY = "adapters"
A, B = ".lora_A.weight", ".lora_B.weight"  # the ends of names in peft's files


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
    config = read_metadata(path).get(_KEY)
    return None if config is None else dict(json.loads(config))


def refuse_unfit_adapters(
    shapes: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], what: str
) -> None:
    """Refuse adapters of another model.

    Args:
        shapes: shapes of the adapters' tensors.
        expected: shapes of the model's own checkpoint.
        what: their source, for the message.

    Raises:
        ModelError: a matrix has no adapter of its size, or half an adapter.
    """
    layers = {name.removesuffix(A).removesuffix(B) for name in shapes}
    for layer in sorted(layers):
        a, b = shapes.get(layer + A, ()), shapes.get(layer + B, ())
        weight = expected.get(layer.removeprefix(PREFIX) + ".weight", ())
        if len(a) != 2 or len(b) != 2 or a[0] != b[1] or (b[0], a[1]) != weight:
            raise ModelError(
                f"{what} does not fit the model in the engine: {layer}",
                value=(a, b),
                allowed=f"A and B of a matrix {weight}",
                todo="start the engine with the model.path that the trainer began with",
            )
