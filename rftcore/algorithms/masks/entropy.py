"""Learn at the tokens where the policy is undecided: those of the highest entropy (Wang et al. 2025, arXiv 2506.01939).

    kept where H_t ≥ the (1 - share) quantile of H over the batch's tokens

H is the entropy of the policy's distribution before the token, before the step. The quantile between two tokens is interpolated, as in TRL's
top_entropy_quantile. Dropped tokens still count in the loss's denominator.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pydantic import Field

from rftcore.algorithms.base import PartConfig, Signals, StepBatch, TokenMask

if TYPE_CHECKING:
    from torch import Tensor


class EntropyConfig(PartConfig):
    share: float = Field(0.2, gt=0, le=1, description="Share of the batch's tokens that gives a gradient.")


class Entropy(TokenMask):
    Config = EntropyConfig
    needs = frozenset({"entropy"})
    config: EntropyConfig

    def __call__(self, batch: StepBatch, signals: Signals, advantages_N: Tensor) -> Tensor:
        assert signals.entropy_N is not None
        if not len(signals.entropy_N):
            return advantages_N.new_ones(0).bool()
        ascending = signals.entropy_N.sort().values  # torch.quantile takes 16 million numbers at most
        place = (1.0 - self.config.share) * (len(ascending) - 1)
        low, high = ascending[math.floor(place)], ascending[math.ceil(place)]
        kept_N: Tensor = signals.entropy_N >= low.lerp(high, place - math.floor(place))
        return kept_N
