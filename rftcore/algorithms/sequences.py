"""The sequences and preference pairs to which the tokens of a micro-batch belong.

They are computed on the CPU when micro-batches are cut. The number of sequences determines the sizes of tensors. If it were computed on a
GPU, the host would wait for all work launched before.

Letters: N tokens, S sequences that have a token among them, P pairs that have one, B sequences of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from rftcore.algorithms.device_copy import copy_to_device

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """The sequences and pairs of a micro-batch, each in the batch's order.

    Attributes:
        sequence_S: int64; the sequence in the batch, 0..B-1.
        num_tokens_S: int64; its tokens, at least 1.
        place_N: int64; the place of each token's sequence in `sequence_S`.
        pair_P: int64; the pair in the batch: that of the sequences 2p (chosen) and 2p + 1 (rejected).
        slot_S: int64; the place of each sequence in a flattened [P, 2] of pairs.
    """

    sequence_S: Tensor
    num_tokens_S: Tensor
    place_N: Tensor
    pair_P: Tensor
    slot_S: Tensor

    @classmethod
    def of(cls, sequence_N: Tensor) -> Sequences:
        """Return the sequences of tokens.

        Args:
            sequence_N: int64, on the CPU; the sequence of each token.
        """
        import numpy as np
        import torch

        sequence_S, place_N, num_tokens_S = np.unique(sequence_N.numpy(), return_inverse=True, return_counts=True)
        pair_P, place_S = np.unique(sequence_S // 2, return_inverse=True)
        columns = (sequence_S, num_tokens_S, place_N, pair_P, 2 * place_S + sequence_S % 2)
        return cls(
            **{
                entry.name: torch.from_numpy(each.astype(np.int64))
                for entry, each in zip(fields(cls), columns, strict=True)
            }
        )

    def to(self, device: torch.device) -> Sequences:
        """Return the sequences with their tensors on `device`."""
        return replace(
            self, **{entry.name: copy_to_device(getattr(self, entry.name), device) for entry in fields(self)}
        )

    @property
    def sequence_N(self) -> Tensor:
        """int64; the sequence of each token."""
        return self.sequence_S[self.place_N]

    def sum_per_sequence(self, values_N: Tensor) -> Tensor:
        """Sum the values over each sequence's tokens, [S]; carries the gradient."""
        return values_N.new_zeros(len(self.sequence_S)).index_add(0, self.place_N, values_N)

    def in_pairs(self, values_S: Tensor) -> Tensor:
        """Return the values of the chosen and the rejected sequence of each pair, [P, 2]; 0 for a sequence without tokens. Carries the gradient."""
        return values_S.new_zeros(2 * len(self.pair_P)).index_add(0, self.slot_S, values_S).view(-1, 2)
