"""Clip-V: drop tokens with a negative advantage that would cost the most entropy, compared with the vocabulary (arXiv 2602.03392).

    D_t = E_v[S_v] - S_t        S as in clip_b; E over the vocabulary under π_old, Σ_v p_v² (H + log p_v)

Tokens with a negative advantage and D_t > μ std(D), the standard deviation over the batch, are dropped: at most a share `max_share` of
all tokens, those with the largest D first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from rftcore.algorithms.base import PartConfig, Signals, StepBatch, TokenMask
from rftcore.algorithms.masks.clip_b import discriminator

if TYPE_CHECKING:
    from torch import Tensor


class ClipVConfig(PartConfig):
    mu: float = Field(8.5, ge=0, description="μ: standard deviations from which tokens are dropped.")
    max_share: float = Field(1.0e-4, ge=0, le=1, description="Largest share of the batch's tokens that is dropped.")


class ClipV(TokenMask):
    """A batch of fewer than 1 / max_share tokens drops none."""

    Config = ClipVConfig
    needs = frozenset({"old", "entropy", "discriminator"})
    config: ClipVConfig

    def __call__(self, batch: StepBatch, signals: Signals, advantages_N: Tensor) -> Tensor:
        assert signals.discriminator_N is not None
        kept_N = advantages_N.new_ones(len(advantages_N)).bool()
        if len(advantages_N) < 2:
            return kept_N
        excess_N = signals.discriminator_N.double() - discriminator(signals)
        candidate_N = (advantages_N < 0) & (excess_N > self.config.mu * excess_N.std(correction=1))
        num_dropped = min(int(candidate_N.sum()), int(self.config.max_share * len(advantages_N)))
        dropped = excess_N.where(candidate_N, float("-inf")).topk(num_dropped).indices
        kept_N[dropped] = False
        return kept_N


def expected_discriminator(logprobs_NV: Tensor) -> Tensor:
    """Compute E_v[S_v] of distributions [N, V] over the vocabulary, [N]: the signal `discriminator`."""
    p_NV = logprobs_NV.exp()
    entropy_N = -(p_NV * logprobs_NV.clamp(min=-1e4)).sum(dim=-1)
    expected_N: Tensor = (p_NV.square() * (entropy_N.unsqueeze(-1) + logprobs_NV.clamp(min=-1e4))).sum(dim=-1)
    return expected_N
