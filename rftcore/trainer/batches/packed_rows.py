"""Layouts of a packed row: where its sequences lie, for the attention kernels of a GPU (`Segments`) and of a CPU (`PaddedRows`).

A packed row of L tokens holds, in this order, sequences of their own, prompts that several experiences share, and the continuations of
those prompts, prompt after prompt.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rftcore.algorithms.device_copy import copy_to_device


class Segments(NamedTuple):
    """A packed row for FlashAttention.

    Attributes:
        starts_S: int32 [S + 1]; where each segment begins, and L.
        longest: tokens of the longest segment.
        prompt_starts_G, continuation_starts_G: int32 [G + 1]; where each shared prompt begins, and its continuations together, counted
            from the first shared prompt and from the first continuation. None where no prompt is shared.
        longest_prompt, longest_continuations: tokens.
        first_prompt, first_continuation: place of the first token of each kind in the row.
    """

    starts_S: Tensor
    longest: int
    prompt_starts_G: Tensor | None = None
    continuation_starts_G: Tensor | None = None
    longest_prompt: int = 0
    longest_continuations: int = 0
    first_prompt: int = 0
    first_continuation: int = 0

    @property
    def shares_prompts(self) -> bool:
        return self.prompt_starts_G is not None

    @property
    def prompts(self) -> slice:
        """Places of the shared prompts in the row."""
        return slice(self.first_prompt, self.first_continuation)

    @property
    def continuations(self) -> slice:
        """Places of the continuations in the row."""
        return slice(self.first_continuation, None)


class Rows(NamedTuple):
    """Rows of similar length, padded on the right.

    Attributes:
        place_RW: int64; the packed place of each token, 0 for padding.
        visible_R1WW: bool, True where row may look at column; None where every row is one sequence: plain causal attention is right then.
    """

    place_RW: Tensor
    visible_R1WW: Tensor | None


class PaddedRows(NamedTuple):
    """A packed row for `scaled_dot_product_attention`.

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
