"""Weights of tokens, with which the loss of a batch is one weighted sum.

The weights come from the whole optimizer batch over all ranks. With n tokens in all, n_s in a sequence, R rollouts that have a token, and
b sequences with a token in the sequence's rollout, its branches:

    token-mean               1 / n            DAPO (arXiv 2503.14476, eq. 8)
    seq-mean-token-mean      1 / (R b n_s)    GRPO (arXiv 2402.03300, eq. 3)
    seq-mean-token-sum       1 / (R b)
    seq-mean-token-sum-norm  1 / (R b L)      Dr. GRPO (arXiv 2503.20783): a constant L for every length

So a rollout counts once in a mean over sequences, however often its chats fork.

TRL's names for the four `loss_type`s are dapo, grpo, – and dr_grpo. Its bnpo is token-mean over a micro-batch, which depends on how
a batch is cut, and so has no counterpart here. Your own aggregation is a subclass of `Aggregation`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from pydantic import Field

from rftcore.algorithms.base import Part, PartConfig

if TYPE_CHECKING:
    from torch import Tensor


class Aggregation(Part, ABC):
    """Weighs tokens by the lengths of their sequences."""

    @abstractmethod
    def __call__(self, tokens_B: Tensor, share_B: Tensor, sequence_N: Tensor) -> Tensor:
        """Return the weight of each token that counts, float64 [N]; entries of other tokens are not read.

        Args:
            tokens_B: float64; the tokens of each sequence that count. At least one sequence has one.
            share_B: float64; the share of each sequence in its rollout, 1 / b of b sequences with a token, 0 without one. The sum is the
                number of rollouts.
            sequence_N: int64; the sequence of each token.
        """


class TokenMean(Aggregation):
    """All tokens of the batch have equal weight."""

    def __call__(self, tokens_B: Tensor, share_B: Tensor, sequence_N: Tensor) -> Tensor:
        return (1.0 / tokens_B.sum()).expand(len(sequence_N))


class SequenceMeanTokenMean(Aggregation):
    """All rollouts have equal weight, the sequences within each of them, and the tokens within each sequence."""

    def __call__(self, tokens_B: Tensor, share_B: Tensor, sequence_N: Tensor) -> Tensor:
        return (share_B / (share_B.sum() * tokens_B.clamp(min=1)))[sequence_N]


class SequenceMeanTokenSum(Aggregation):
    """The sum over a sequence, averaged over the sequences of a rollout, and over rollouts."""

    def __call__(self, tokens_B: Tensor, share_B: Tensor, sequence_N: Tensor) -> Tensor:
        return (share_B / share_B.sum())[sequence_N]


class SequenceMeanTokenSumNormConfig(PartConfig):
    length: int = Field(ge=1, description="L, usually the longest response that is allowed: explorer.max_tokens.")


class SequenceMeanTokenSumNorm(Aggregation):
    """The sum over a sequence divided by a constant, averaged over the sequences of a rollout, and over rollouts."""

    Config = SequenceMeanTokenSumNormConfig
    config: SequenceMeanTokenSumNormConfig

    def __call__(self, tokens_B: Tensor, share_B: Tensor, sequence_N: Tensor) -> Tensor:
        return (share_B / (share_B.sum() * self.config.length))[sequence_N]


def token_weights(sequence_N: Tensor, rollout_B: Tensor, aggregation: Aggregation, counted_N: Tensor) -> Tensor:
    """Return the weight of each token, float32 [N]; 0 where `counted_N` is False. All are 0 in a batch where no token is counted.

    Args:
        sequence_N: int64; the sequence of each token.
        rollout_B: int64; the number of each sequence's rollout.
        counted_N: bool; the tokens of the loss term.
    """
    if not bool(counted_N.any()):
        return counted_N.float()
    counted = counted_N.double()
    tokens_B = counted.new_zeros(len(rollout_B)).index_add(0, sequence_N, counted)
    return aggregation(tokens_B, shares(tokens_B, rollout_B), sequence_N).where(counted_N, 0.0).float()


def shares(tokens_B: Tensor, rollout_B: Tensor) -> Tensor:
    """Return the share of each sequence in its rollout, float64 [B]: 1 / b of b sequences with a token, 0 without one."""
    has_token_B = (tokens_B > 0).double()
    num_R = has_token_B.new_zeros(len(rollout_B)).index_add(0, rollout_B, has_token_B)
    return has_token_B / num_R[rollout_B].clamp(min=1)
