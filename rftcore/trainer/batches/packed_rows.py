"""Layouts of a packed row: where its sequences lie, for the attention kernels of a GPU (`Segments`) and of a CPU (`PaddedRows`).

A packed row of L tokens holds, in this order, sequences of their own, prompts that several experiences share, and the continuations of
those prompts, prompt after prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rftcore.algorithms.device_copy import copy_to_device


class Segments(NamedTuple):
    """A packed row for FlashAttention: every segment attends causally to its keys, and its own tokens are the last of them.

    The keys of a continuation begin with those of its prompt, so keys and values of a shared prompt are copied for each of its continuations.

    Attributes:
        starts_S: int32 [S + 1]; where each segment begins, and L.
        longest: tokens of the longest segment.
        key_starts_S: int32 [S + 1]; where the keys of each segment begin, and K. None, as everything after it, where no prompt is shared.
        longest_keys: of a segment.
        key_place_K: int64; the place in the row of each key.
        copies_K: int64; the keys in the order of their places in the row.
        first_copy_L: int64; where the keys of each token begin in `copies_K`.
    """

    starts_S: Tensor
    longest: int
    key_starts_S: Tensor | None = None
    longest_keys: int = 0
    key_place_K: Tensor | None = None
    copies_K: Tensor | None = None
    first_copy_L: Tensor | None = None


class Rows(NamedTuple):
    """Rows of similar length, padded on the right.

    Attributes:
        place_RW: int64; the packed place of each token, 0 for padding.
        visible_R1WW: bool, True where row may look at column; None where every row is one sequence: plain causal attention is right then.
    """

    place_RW: Tensor
    visible_R1WW: Tensor | None


@dataclass(slots=True)
class PaddedRows:
    """A packed row for `scaled_dot_product_attention`.

    Neither a tuple nor frozen: compiled code would depend on the number of its parts.

    Attributes:
        parts: rows that contain every token of the packed row once.
        place_L: int64; the place of each token of the packed row in the parts, flattened and put one after the other.
    """

    parts: tuple[Rows, ...]
    place_L: Tensor


Packing = Segments | PaddedRows


def to_device(packing: Packing, device: torch.device) -> Packing:
    """Return the packing with its tensors on `device`."""

    def on_device(value: Any) -> Any:
        return copy_to_device(value, device) if isinstance(value, Tensor) else value

    if isinstance(packing, Segments):
        return Segments(*map(on_device, packing))
    return PaddedRows(tuple(Rows(*map(on_device, rows)) for rows in packing.parts), on_device(packing.place_L))
