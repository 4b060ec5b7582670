"""TOPR: unwanted responses count by how likely they still are (Le Roux et al. 2025, arXiv 2503.14286).

    loss_t = -sg(α) A_t log π(o_t)        α = 1 where A_t > 0, clip(ρ, low, high) elsewhere

with sg for stopped gradient and ρ the ratio of the whole response in the paper (`level: product`).
"""

from __future__ import annotations

from pydantic import Field, model_validator

from rftcore.algorithms.base import Loss, PartConfig, TokenTerm, TokenView
from rftcore.algorithms.losses.ratios import Level, log_ratio


class TOPRConfig(PartConfig):
    level: Level = Field("product", description="What one ratio is computed over.")
    low: float = Field(0.0, ge=0, description="Lower bound of α.")
    high: float = Field(1.0, ge=0, description="Upper bound of α.")

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> TOPRConfig:
        if self.low > self.high:
            raise ValueError("low must not be above high")
        return self


class TOPR(TokenTerm):
    """Metrics: `taper_mean`, the mean of α."""

    Config = TOPRConfig
    compares = True
    uses_advantages = True
    config: TOPRConfig

    def __call__(self, view: TokenView) -> Loss:
        advantages_N = view.advantages_N
        tapered_N = log_ratio(view, self.config.level).detach().exp().clamp(self.config.low, self.config.high)
        alpha_N = tapered_N.where(advantages_N <= 0, 1.0)
        return Loss(-alpha_N * advantages_N * view.logprobs_N, {"taper_mean": alpha_N})
