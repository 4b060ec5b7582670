"""SAPO: a soft gate in place of the clip (Gao et al. 2025, arXiv 2511.20347).

    loss_t = -(4 / τ) σ(τ (ρ_t - 1)) A_t          τ = tau_positive where A_t > 0, tau_negative elsewhere

The gate is differentiated: its gradient 4 σ (1 - σ) ρ_t A_t ∇log π is that of -ρ_t A_t at ρ_t = 1, and fades on both sides.
"""

from __future__ import annotations

from pydantic import Field

from rftcore.algorithms.base import Loss, PartConfig, TokenTerm, TokenView


class SAPOConfig(PartConfig):
    tau_positive: float = Field(1.0, gt=0, description="How fast the gate closes, for positive advantages.")
    tau_negative: float = Field(1.05, gt=0, description="How fast the gate closes, for all other advantages.")


class SAPO(TokenTerm):
    """Metrics: `ratio_mean`."""

    Config = SAPOConfig
    compares = True
    uses_advantages = True
    config: SAPOConfig

    def __call__(self, view: TokenView) -> Loss:
        advantages_N, ratio_N = view.advantages_N, view.log_ratio_N.exp()
        tau_N = ratio_N.new_full((), self.config.tau_positive).where(advantages_N > 0, self.config.tau_negative)
        gate_N = (tau_N * (ratio_N - 1.0)).sigmoid() * 4.0 / tau_N
        return Loss(-gate_N * advantages_N, {"ratio_mean": ratio_N.detach()})
