"""CISPO: clip the importance weight instead of the update (MiniMax-M1, arXiv 2506.13585).

    loss_t = -sg(clip(ρ_t, 1 - low, 1 + high)) A_t log π(o_t)

with sg for stopped gradient. Every token keeps its gradient. `drop_clipped` drops those that PPO's clip would.
"""

from __future__ import annotations

from pydantic import Field

from rftcore.algorithms.base import Loss, PartConfig, TokenTerm, TokenView
from rftcore.algorithms.losses.ppo import ClipConfig


class CISPOConfig(PartConfig):
    clip: ClipConfig = Field(ClipConfig(low=1.0, high=0.28), description="Clip range: one number, or [low, high].")
    drop_clipped: bool = Field(False, description="Drop tokens that the clip of PPO would give no gradient.")


class CISPO(TokenTerm):
    """Metrics: `ratio_mean`, `clip_fraction`."""

    Config = CISPOConfig
    compares = True
    uses_advantages = True
    config: CISPOConfig

    def __call__(self, view: TokenView) -> Loss:
        low, high = 1.0 - self.config.clip.low, 1.0 + self.config.clip.high
        ratio_N, advantages_N = view.log_ratio_N.detach().exp(), view.advantages_N
        weight_N = ratio_N.clamp(low, high)
        clipped_N = weight_N != ratio_N
        if self.config.drop_clipped:
            beyond_N = ((advantages_N > 0) & (ratio_N > high)) | ((advantages_N < 0) & (ratio_N < low))
            weight_N = weight_N * ~beyond_N
        loss_N = -weight_N * advantages_N * view.logprobs_N
        return Loss(loss_N, {"ratio_mean": ratio_N, "clip_fraction": clipped_N.float()})
