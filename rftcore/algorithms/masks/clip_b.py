"""Clip-B: drop tokens with a negative advantage that would cost the most entropy, compared with the batch (Wang et al. 2026, arXiv 2602.03392).

    S_t = p (H + log p)        p = π_old(o_t), H the entropy of π_old before the token

To first order, raising the logit of the token by ε changes the entropy by -ε S_t. A negative advantage lowers it, so a token with S_t
far below 0 loses entropy. Tokens with a negative advantage and S_t - mean(S) < -μ std(S), over the batch, are dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from rftcore.algorithms.base import PartConfig, Signals, StepBatch, TokenMask

if TYPE_CHECKING:
    from torch import Tensor


class ClipBConfig(PartConfig):
    mu: float = Field(2.5, ge=0, description="μ: standard deviations below the mean from which tokens are dropped.")


class ClipB(TokenMask):
    Config = ClipBConfig
    needs = frozenset({"old", "entropy"})
    config: ClipBConfig

    def __call__(self, batch: StepBatch, signals: Signals, advantages_N: Tensor) -> Tensor:
        score_N = discriminator(signals)
        if len(score_N) < 2:
            return advantages_N.new_ones(len(advantages_N)).bool()
        return (advantages_N >= 0) | (score_N - score_N.mean() >= -self.config.mu * score_N.std(correction=1))


def discriminator(signals: Signals) -> Tensor:
    """Compute S of each token, float64 [N]."""
    assert signals.old_N is not None and signals.entropy_N is not None
    logprobs_N = signals.old_N.double()
    # p log p is 0 where p is 0, instead of -inf · 0.
    return logprobs_N.exp() * (signals.entropy_N.double() + logprobs_N.clamp(min=-1e4))
