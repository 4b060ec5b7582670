"""Simple PPO: the policy gradient in log space, of tokens near their anchor (Trinity-RFT's sppo).

    loss_t = -A_t (log π(o_t) - log π_anchor(o_t))        where 1 / (1 + ε) ≤ ρ_t ≤ 1 + ε, 0 elsewhere

Its gradient at a token that is kept is that of REINFORCE, whatever its ratio.
"""

from __future__ import annotations

import math

from pydantic import Field

from rftcore.algorithms.base import Loss, PartConfig, TokenTerm, TokenView


class SPPOConfig(PartConfig):
    epsilon: float = Field(0.3, gt=0, description="ε: tokens with a ratio outside [1 / (1 + ε), 1 + ε] are dropped.")


class SPPO(TokenTerm):
    """Metrics: `ratio_mean`, `clip_fraction`, the share of tokens that are dropped."""

    Config = SPPOConfig
    compares = True
    uses_advantages = True
    config: SPPOConfig

    def __call__(self, view: TokenView) -> Loss:
        log_ratio_N = view.log_ratio_N
        dropped_N = log_ratio_N.detach().abs() > math.log1p(self.config.epsilon)
        metrics = {"ratio_mean": log_ratio_N.detach().exp(), "clip_fraction": dropped_N.float()}
        return Loss(-view.advantages_N * log_ratio_N * ~dropped_N, metrics)
