"""DPPO: the clip of PPO by the distance that probabilities moved, instead of by their ratio (Qi et al. 2026, arXiv 2602.04879, Binary-TV and Binary-KL).

    loss_t = -sg(min(ρ_t, limit)) m_t A_t log π(o_t)

    D_t      p = π(o_t), q = π_anchor(o_t)
             tv   |p - q|
             kl   q log(q / p) + (1 - q) log((1 - q) / (1 - p))
    m_t      0 where A > 0, p > q and D > high, or A ≤ 0, p < q and D > low; else 1

sg stops the gradient. D is the divergence of the two-sided choice between the token and any other one, a lower bound of that over the
vocabulary. So a rare token may change its ratio by much, while a likely one may not lose much of its mass (github.com/sail-sg/Stable-RL,
_compute_token_mask_for_policy_loss in verl/trainer/ppo/core_algos.py at c6af1d1; compute_policy_loss_dppo_tv and _kl of verl).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rftcore.algorithms.base import Loss, PartConfig, TokenTerm, TokenView

# As in the authors' code, for a token that is certain.
_TINY = 1e-8
# An impossible token (-inf) would give 0 · inf. e^-100 is 0 in float32.
_MIN_LOGPROB = -100.0


class DPPOConfig(PartConfig):
    divergence: Literal["tv", "kl"] = Field("tv", description="D of the formula.")
    low: float = Field(0.15, gt=0, description="Largest D of a token that is made less likely; 0.05 is usual for kl.")
    high: float = Field(0.15, gt=0, description="Largest D of a token that is made more likely; 0.05 is usual for kl.")
    limit: float = Field(20.0, gt=1, description="Largest weight of a token.")


class DPPO(TokenTerm):
    """Metrics: `ratio_mean`, `clip_fraction`, the share of tokens that are dropped."""

    Config = DPPOConfig
    compares = True
    uses_advantages = True
    config: DPPOConfig

    def __call__(self, view: TokenView) -> Loss:
        config, advantages_N = self.config, view.advantages_N
        logprobs_N, anchor_N = (x.detach().clamp(min=_MIN_LOGPROB) for x in (view.logprobs_N, view.anchor_N))
        p_N, q_N = logprobs_N.exp(), anchor_N.exp()
        moved_N = p_N - q_N
        if config.divergence == "tv":
            distance_N = moved_N.abs()
        else:
            others_N = ((1.0 - q_N + _TINY) / (1.0 - p_N + _TINY)).log()
            distance_N = q_N * (anchor_N - logprobs_N) + (1.0 - q_N) * others_N
        beyond_N = ((moved_N > 0) & (distance_N > config.high)).where(
            advantages_N > 0, (moved_N < 0) & (distance_N > config.low)
        )
        ratio_N = view.log_ratio_N.detach().exp()
        loss_N = -ratio_N.clamp(max=config.limit) * ~beyond_N * advantages_N * view.logprobs_N
        return Loss(loss_N, {"ratio_mean": ratio_N, "clip_fraction": beyond_N.float()})
