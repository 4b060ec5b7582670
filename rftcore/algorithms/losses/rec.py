"""REC: REINFORCE made off-policy by dropping and weighing tokens (Yao et al. 2025, arXiv 2509.24203).

    loss_t = -w_t m_t A_t log π(o_t) + coef · regulariser_t

    clip m_t        none
                    one-side           1 where A > 0 and ρ ≤ 1 + high, or A < 0 and ρ ≥ 1 - low
                    two-side           1 where 1 - low ≤ ρ ≤ 1 + high
                    ring               two-side, and besides where A > 0 and ρ ≤ 1 - outer.low, or A < 0 and ρ ≥ 1 + outer.high
                    gspo-one-side      one-side with the ratio of the sequence (geometric mean)
    weight w_t      none               1
                    importance         sg(ρ)
                    sequence           sg(the ratio of the sequence)
                    advantage          exp(A / temperature)
    regulariser     none
                    k2                 ½ (log π - log π_anchor)²
                    forward-kl         -log π                    the divergence of the policy that sampled from the policy

sg stops the gradient. `one-side` with `importance` has the gradient of PPO's clipped loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from rftcore.algorithms.base import MAX_LOG_RATIO, Loss, PartConfig, TokenTerm, TokenView
from rftcore.algorithms.losses.ppo import ClipConfig
from rftcore.algorithms.losses.ratios import log_ratio

if TYPE_CHECKING:
    from torch import Tensor


class RECConfig(PartConfig):
    mode: Literal["none", "one-side", "two-side", "ring", "gspo-one-side"] = Field(
        "one-side", description="Which tokens are dropped: m of the formula."
    )
    clip: ClipConfig = Field(ClipConfig(), description="Clip range: one number, or [low, high].")
    outer: ClipConfig = Field(ClipConfig(low=0.6, high=2.0), description="The outer range of ring.")
    weight: Literal["none", "importance", "sequence", "advantage"] = Field(
        "importance", description="w of the formula."
    )
    temperature: float = Field(1.0, gt=0, description="Temperature of the weight advantage.")
    regulariser: Literal["none", "k2", "forward-kl"] = Field("none", description="Added to the loss of each token.")
    coef: float = Field(0.0, ge=0, description="Weight of the regulariser.")

    @model_validator(mode="after")
    def _ranges_are_nested(self) -> RECConfig:
        if self.mode == "ring" and (self.outer.low < self.clip.low or self.outer.high < self.clip.high):
            raise ValueError("outer must not be narrower than clip")
        if (self.coef > 0) == (self.regulariser == "none"):
            raise ValueError("regulariser and coef go together: name one and set coef above 0, or leave both out")
        return self


class REC(TokenTerm):
    """Metrics: `ratio_mean`, `clip_fraction`, the share of tokens that are dropped."""

    Config = RECConfig
    compares = True
    uses_advantages = True
    config: RECConfig

    def __call__(self, view: TokenView) -> Loss:
        config, advantages_N = self.config, view.advantages_N
        ratio_N = log_ratio(view, "token").detach().exp()
        sequence_N = log_ratio(view, "sequence").detach().exp()
        kept_N = self._kept(sequence_N if config.mode == "gspo-one-side" else ratio_N, advantages_N)
        tempered_N = (advantages_N / config.temperature).clamp(max=MAX_LOG_RATIO).exp()
        ones_N = ratio_N.new_ones(len(ratio_N))
        weight_N = {"none": ones_N, "importance": ratio_N, "sequence": sequence_N, "advantage": tempered_N}[
            config.weight
        ]
        loss_N = -weight_N * kept_N * advantages_N * view.logprobs_N
        if config.regulariser == "k2":
            loss_N = loss_N + config.coef * 0.5 * view.log_ratio_N.square()
        elif config.regulariser == "forward-kl":
            loss_N = loss_N - config.coef * view.logprobs_N
        return Loss(loss_N, {"ratio_mean": ratio_N, "clip_fraction": (~kept_N).float()})

    def _kept(self, ratio_N: Tensor, advantages_N: Tensor) -> Tensor:
        config = self.config
        above_N, below_N = ratio_N >= 1.0 - config.clip.low, ratio_N <= 1.0 + config.clip.high
        if config.mode == "none":
            return ratio_N > 0
        if config.mode in ("one-side", "gspo-one-side"):
            return below_N.where(advantages_N > 0, above_N)
        within_N = above_N & below_N
        if config.mode == "two-side":
            return within_N
        far_N = (ratio_N <= 1.0 - config.outer.low).where(advantages_N > 0, ratio_N >= 1.0 + config.outer.high)
        return within_N | far_N
