"""Stacked weights: one tensor in the model and several in its files, such as the experts of a layer.

transformers would join the parts when it opens a model, in the memory of every rank. Here it gets tensors without memory in their place, and the parts
stay in the mapped files until their layer is taken to the device.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from rftcore.sync.checkpoint_layout import CheckpointLayout, Piece
from rftcore.sync.files.weights_file import files_of_model, iterate_weights, read_shapes

Model = TypeVar("Model", bound=PreTrainedModel)
Unread = dict[nn.Parameter, Callable[[Tensor], None]]
"""Parameters without memory, each with the function that reads its values into a contiguous tensor of its shape, on any device and of any type."""

_NUMBER = re.compile(r"(?:^|\.)\d+(?=\.)")


def has_lists_in_layers(folder: Path) -> bool:
    """Return whether the files of a model have lists of modules within its list of layers, such as experts; only these can be stacked."""
    return any(len(_NUMBER.findall(name)) > 1 for file in files_of_model(folder) for name in read_shapes(file))


def open_stacked(folder: Path, make: Callable[[], Model], dtype: torch.dtype) -> tuple[Model, Unread, set[str]]:
    """Open the model in a folder without reading stacked weights.

    Args:
        make: returns a model of the folder's configuration, with weights of any values; called while tensors get no memory.
        dtype: of the weights.

    Returns:
        The model, its unread parameters, and the names of weights that are missing from its files.

    Raises:
        ConfigError: see `CheckpointLayout`.
        OSError, ValueError: the files cannot be read, or belong to another model.
    """
    with torch.device("meta"):
        blank = make()
    layout, missing = CheckpointLayout(blank), set[str]()
    stored = dict(chain.from_iterable(map(iterate_weights, files_of_model(folder))))  # as parts of the mapped files
    unread = dict[str, list[tuple[Piece, Tensor]]]()
    for name, tensor in blank.state_dict().items():
        pieces = layout.pieces(name) or ()
        if name in stored or all(piece.has_rows for piece in pieces):
            continue  # transformers loads it unchanged
        missing |= {piece.name for piece in pieces if piece.name not in stored}
        unread[name] = [(piece, stored.pop(piece.name)) for piece in pieces if piece.name in stored]
        stored[name] = torch.zeros((), dtype=dtype).expand(tensor.shape)
    _refuse_other_parts(unread, stored)
    kind: Any = type(blank)
    model, report = kind.from_pretrained(
        None, config=blank.config, state_dict=stored, dtype=dtype, output_loading_info=True
    )
    if unread:
        model._weight_conversions = None  # transformers recorded none, and would fall back to those of the family
    if model.can_generate():
        with suppress(OSError):  # there is none
            model.generation_config = GenerationConfig.from_pretrained(folder)
    read: Unread = {model.get_parameter(name): partial(_read, parts) for name, parts in unread.items()}
    return model, read, missing | report["missing_keys"]


def _refuse_other_parts(unread: dict[str, list[tuple[Piece, Tensor]]], others: Iterable[str]) -> None:
    """Raise a ValueError if the files have parts of other shapes than the configuration says, or more of them."""
    parts = [part for of_weight in unread.values() for part in of_weight]
    for piece, values in parts:
        if piece.shape != tuple(values.shape):
            raise ValueError(
                f"{piece.name} has the shape {tuple(values.shape)}, and by config.json it has {piece.shape}"
            )
    lists = {_list_of(piece.name) for piece, _ in parts}
    for name in others:
        if _list_of(name) in lists:
            raise ValueError(f"by config.json there is no {name}")


def _list_of(name: str) -> str:
    """Return the name of the innermost list of modules that contains a weight; empty if none does."""
    numbers = [*_NUMBER.finditer(name)]
    return name[: numbers[-1].start()] if numbers else ""


def _read(parts: Sequence[tuple[Piece, Tensor]], into: Tensor) -> None:
    for piece, values in parts:
        piece.view(into).copy_(values)
