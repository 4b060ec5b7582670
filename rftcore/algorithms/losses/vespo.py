"""VESPO: a smooth weight of the whole response in place of a clip (Shen et al. 2026, arXiv 2602.10693).

    w       = Π_t π(o_t) / π_anchor(o_t)
    φ(w)    = w^k e^{λ (1 - w)}              1 at w = 1, largest at w = k / λ, and near 0 for responses far from the anchor
    loss_t  = -sg(φ(w)) A_t log π(o_t)       k, λ by the sign of A

sg stops the gradient (github.com/FloyedShen/VESPO, compute_policy_loss_vespo in recipe/vespo/code/core_algos.py at aa1f304; TRL's loss_type
vespo). φ needs no mean over the response's tokens, so that w is an importance weight.
"""

from __future__ import annotations

from pydantic import Field

from rftcore.algorithms.base import Loss, PartConfig, TokenTerm, TokenView
from rftcore.algorithms.losses.ratios import log_ratio


class VESPOConfig(PartConfig):
    k_positive: float = Field(2.0, ge=0, description="k where A is not negative.")
    lambda_positive: float = Field(3.0, gt=0, description="λ where A is not negative.")
    k_negative: float = Field(3.0, ge=0, description="k where A is negative.")
    lambda_negative: float = Field(2.0, gt=0, description="λ where A is negative.")


class VESPO(TokenTerm):
    """Metrics: `weight_mean`, the mean of φ."""

    Config = VESPOConfig
    compares = True
    uses_advantages = True
    config: VESPOConfig

    def __call__(self, view: TokenView) -> Loss:
        config, advantages_N = self.config, view.advantages_N
        log_w_N = log_ratio(view, "product").detach()
        is_negative_N = advantages_N < 0
        k_N = log_w_N.new_full((), config.k_negative).where(is_negative_N, config.k_positive)
        lambda_N = log_w_N.new_full((), config.lambda_negative).where(is_negative_N, config.lambda_positive)
        phi_N = (k_N * log_w_N - lambda_N * log_w_N.expm1()).exp()
        return Loss(-phi_N * advantages_N * view.logprobs_N, {"weight_mean": phi_N})
