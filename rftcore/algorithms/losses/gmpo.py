"""GMPO: the geometric mean of a response's ratios, each of them clipped before (Zhao et al. 2025, arXiv 2507.20673).

    d_t  = log π(o_t) - log π_anchor(o_t)
    c_t  = min(d_t, high) where A > 0, max(d_t, -low) elsewhere
    s    = exp(mean_t c_t)
    loss = -s A                         with `aggregation: seq-mean-token-mean` one per response

The range is in logarithms, and wider than PPO's: the paper's is [e^-0.4, e^0.4]. A clipped token gives no gradient and still counts in s, unlike in
`ppo` with `level: sequence`, which clips s itself (github.com/callsys/GMPO, train_zero_math_gmpo.py at 205b2bf, critic_type_modify gmpo).
"""

from __future__ import annotations

from pydantic import Field

from rftcore.algorithms.base import Loss, PartConfig, TokenTerm, TokenView


class GMPOConfig(PartConfig):
    low: float = Field(0.4, ge=0, description="The log-ratio of a token counts down to -low (nats).")
    high: float = Field(0.4, ge=0, description="The log-ratio of a token counts up to high (nats).")


class GMPO(TokenTerm):
    """Metrics: `ratio_mean` (of s), `clip_fraction`."""

    Config = GMPOConfig
    compares = True
    uses_advantages = True
    config: GMPOConfig

    def __call__(self, view: TokenView) -> Loss:
        log_ratio_N, advantages_N = view.log_ratio_N, view.advantages_N
        clipped_N = log_ratio_N.clamp(max=self.config.high).where(
            advantages_N > 0, log_ratio_N.clamp(min=-self.config.low)
        )
        # As in `ratios.log_ratio`, each token carries its own share of the gradient of the response's ratio.
        own_N = clipped_N - clipped_N.detach()
        ratio_N = (view.sequence_mean(clipped_N.detach()) + own_N).exp()
        metrics = {"ratio_mean": ratio_N.detach(), "clip_fraction": (clipped_N != log_ratio_N).float()}
        return Loss(-ratio_N * advantages_N, metrics)
