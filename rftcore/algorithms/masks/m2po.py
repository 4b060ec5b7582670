"""M2PO: drop the tokens that moved furthest, until the second moment of the rest is small (Zheng et al. 2025, arXiv 2510.01161).

    m_t = (log π_old(o_t) - log π_behavior(o_t))²

π_old is the policy before the step. The tokens with the largest m are dropped, as few as leave a mean of m below the threshold. It is
one statistic of the whole batch, so that a few outliers do not clip the many tokens of a stale batch, as a range per token does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from rftcore.algorithms.base import PartConfig, Signals, StepBatch, TokenMask

if TYPE_CHECKING:
    from torch import Tensor


class M2POConfig(PartConfig):
    threshold: float = Field(0.04, gt=0, description="The second moment stays below this (nats²).")


class M2PO(TokenMask):
    """Tokens that no policy sampled count in no statistic, and are kept."""

    Config = M2POConfig
    needs = frozenset({"old", "behavior"})
    config: M2POConfig

    def __call__(self, batch: StepBatch, signals: Signals, advantages_N: Tensor) -> Tensor:
        import torch

        assert signals.old_N is not None
        moment_N = (signals.old_N - batch.behavior_N).double().square()
        sampled_N = (~moment_N.isnan()).nonzero().flatten()
        ascending, order = moment_N[sampled_N].sort()
        # The means of the smallest 1, 2, … moments never fall, so those below the threshold are the first ones.
        means = ascending.cumsum(0) / torch.arange(1, len(ascending) + 1)
        kept_N = advantages_N.new_ones(len(advantages_N)).bool()
        kept_N[sampled_N[order]] = means < self.config.threshold
        return kept_N
