"""KL-Cov: the policy gradient, and a penalty on the few tokens that cost the most entropy (Cui et al. 2025, arXiv 2505.22617).

    loss_t = -ρ_t A_t + coef |log ρ_t|       the second summand at tokens that the mask names

The mask drops no token here: `masks.cov` names them (github.com/PRIME-RL/Entropy-Mechanism-of-RL, compute_policy_loss_kl_cov in
verl/trainer/ppo/core_algos.py at 8850579).
"""

from __future__ import annotations

from pydantic import Field

from rftcore.algorithms.base import Loss, PartConfig, TokenTerm, TokenView


class KLCovConfig(PartConfig):
    coef: float = Field(1.0, ge=0, description="Weight of the penalty.")


class KLCov(TokenTerm):
    """Metrics: `ratio_mean`."""

    Config = KLCovConfig
    compares = True
    uses_advantages = True
    reads_mask = True
    config: KLCovConfig

    def __call__(self, view: TokenView) -> Loss:
        assert view.kept_N is not None
        log_ratio_N = view.log_ratio_N
        ratio_N = log_ratio_N.exp()
        penalty_N = self.config.coef * log_ratio_N.abs() * ~view.kept_N
        return Loss(penalty_N - ratio_N * view.advantages_N, {"ratio_mean": ratio_N.detach()})
