"""Weights that a model has as one tensor and its files in parts, as the experts of a layer: they stay in the mapped files until their layer is placed.

transformers puts such parts together where it opens a model, in the memory of every rank. Here it gets tensors without memory in their place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from rftcore.sync.checkpoint_layout import CheckpointLayout, Piece

Model = TypeVar("Model", bound=PreTrainedModel)
Unread = dict[nn.Parameter, Callable[[Tensor], None]]
"""Parameters without memory, each with the function that reads its values into a contiguous tensor of its shape, on any device and of any type."""

_NUMBER = re.compile(r"(?:^|\.)\d+(?=\.)")


def has_lists_in_layers(folder: Path) -> bool:
    """Whether the files of a model have lists of modules within its list of layers, as experts are; only these may be stacked."""
    return any(len(_NUMBER.findall(name)) > 1 for file in _files(folder) for name in _names(file))


def open_stacked(folder: Path, make: Callable[[], Model], dtype: torch.dtype) -> tuple[Model, Unread, set[str]]:
    """Open the model in a folder; what its files have in parts is not read. Return also the names of the weights that are not in its files.

    Args:
        make: the model of the folder's configuration, with weights of any values; called where tensors have no memory.
        dtype: of the weights.

    Raises:
        ConfigError: see `CheckpointLayout`.
        OSError, ValueError: the files cannot be read, or are not those of the model.
    """
    with torch.device("meta"):
        blank = make()
    layout, stored, unread = CheckpointLayout(blank), _mapped(_files(folder)), dict[str, list[tuple[Piece, Tensor]]]()
    for name, tensor in blank.state_dict().items():
        pieces = layout.pieces(name)
        if pieces is not None and len(pieces) > 1 and all(piece.name in stored for piece in pieces):
            unread[name] = [(piece, stored.pop(piece.name)) for piece in pieces]
            stored[name] = torch.zeros((), dtype=dtype).expand(tensor.shape)
    kind: Any = type(blank)
    model, found = kind.from_pretrained(
        None, config=blank.config, state_dict=stored, dtype=dtype, output_loading_info=True
    )
    model._weight_conversions = None  # transformers saw none, and falls back to those of the family
    if model.can_generate() and (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return (
        model,
        {model.get_parameter(name): partial(_read, parts) for name, parts in unread.items()},
        found["missing_keys"],
    )


def _read(parts: Sequence[tuple[Piece, Tensor]], into: Tensor) -> None:
    for piece, values in parts:
        piece.view(into).copy_(values)


def _files(folder: Path) -> list[Path]:
    """The files of a model's weights; none where they have another format."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return [folder / name for name in sorted({*json.loads(index.read_text())["weight_map"].values()})]
    return [file] if (file := folder / "model.safetensors").exists() else []


def _names(file: Path) -> Iterable[str]:
    with safe_open(file, "pt") as opened:
        return list(opened.keys())


def _mapped(files: Iterable[Path]) -> dict[str, Tensor]:
    """All tensors of files. They are the mapped file, of which all processes of a host share one copy."""
    found = dict[str, Tensor]()
    for file in files:
        with safe_open(file, "pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no dict
    return found
