"""Tensors that a trainer hands to engines, in files or by a transfer: their names, shapes, and which rank of the trainer has which rows.

Importing this module does not import torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import xxhash

if TYPE_CHECKING:
    from torch import Tensor

TensorShapes = tuple[tuple[str, tuple[int, ...]], ...]
"""Name and shape of every tensor that an engine gets."""
AdaptersConfig = dict[str, Any]
"""The contents of peft's adapter_config.json."""


@dataclass(frozen=True)
class Part:
    """Consecutive rows (of the first dimension) of a tensor, and the rank of the trainer that sends or writes them."""

    sender: int
    first_row: int
    num_rows: int


@dataclass(frozen=True)
class WireTensor:
    """One tensor, and how the ranks of the trainer divide it.

    Attributes:
        parts: in the order of their rows; they are all rows, each once. Empty for a tied tensor.
        same_as: name of an earlier tensor with the same values, which travels in its place; None for a tensor that travels itself.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    same_as: str | None = None


@dataclass(frozen=True)
class HeldRows:
    """Rows of a tensor that one rank of a trainer holds.

    Attributes:
        name: name of the tensor.
        first_row: number, in the tensor, of the first of these rows.
        rows: consecutive rows; a number where the tensor is one. In any type.
    """

    name: str
    first_row: int
    rows: Tensor


def shapes_of(tensors: Sequence[WireTensor]) -> TensorShapes:
    """Return names and shapes."""
    return tuple((tensor.name, tensor.shape) for tensor in tensors)


def to_json(tensors: Sequence[WireTensor]) -> list[dict[str, Any]]:
    """Return the elements of `rft.weight_transfer.tensors`."""
    return [
        {"name": tensor.name, "shape": list(tensor.shape)}
        | (
            {"same_as": tensor.same_as}
            if tensor.same_as
            else {"parts": [[p.sender, p.first_row, p.num_rows] for p in tensor.parts]}
        )
        for tensor in tensors
    ]


def from_json(entries: Sequence[dict[str, Any]]) -> tuple[WireTensor, ...]:
    """Read the elements of `rft.weight_transfer.tensors`; the reverse of `to_json`."""
    return tuple(
        WireTensor(
            entry["name"],
            tuple(entry["shape"]),
            tuple(Part(*part) for part in entry.get("parts", ())),
            entry.get("same_as"),
        )
        for entry in entries
    )


@lru_cache(maxsize=4)
def fingerprint(tensors: tuple[WireTensor, ...]) -> str:
    """Return xxh3_64 of a tensor list, 16 hex digits."""
    return xxhash.xxh3_64_hexdigest(json.dumps(to_json(tensors)).encode())
