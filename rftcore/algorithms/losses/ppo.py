"""The clipped surrogate of PPO (Schulman et al. 2017, arXiv 1707.06347, eq. 7).

    ρ_t     = exp(log π(o_t) - log π_anchor(o_t))
    loss_t  = -min(ρ_t A_t, clip(ρ_t, 1 - low, 1 + high) A_t)

`high` > `low` is DAPO's clip-higher (arXiv 2503.14476, section 3.1). `dual_clip` c limits the loss of a negative advantage to -c A
(Ye et al. 2020, arXiv 1912.09729, eq. 5), so that a token far above its anchor does not dominate.

`level: sequence` replaces ρ_t by the geometric mean of the sequence's ratios, whose gradient spreads over its tokens (GSPO,
arXiv 2507.18071, eq. 5 and 7). `level: product` takes the ratio of the whole response, and each of its n tokens has 1 / n of the
response's loss; with `aggregation: seq-mean-token-sum` that is one loss per response, and with a mean over tokens another factor of
1 / length: of the mean length of the batch (`token-mean`) or of the response (`seq-mean-token-mean`). `max_sequence_kl` δ drops the tokens with a
negative advantage of sequences whose mean log(π_anchor / π) is above δ (DeepSeek-V3.2, arXiv 2512.02556, section 3.1).
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator, model_validator

from rftcore.algorithms.base import Loss, PartConfig, TokenTerm, TokenView
from rftcore.algorithms.losses.ratios import Level, log_ratio
from rftdata.config import Section


class ClipConfig(Section):
    """The range in which a ratio counts, as distances from 1. YAML may also give one number for both, or a list `[low, high]`."""

    low: float = Field(0.2, ge=0, le=1, description="The ratio counts down to 1 - low.")
    high: float = Field(0.2, ge=0, description="The ratio counts up to 1 + high.")

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, value: Any) -> Any:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return {"low": value, "high": value}
        if isinstance(value, list | tuple):
            if len(value) != 2:
                raise ValueError("clip takes two numbers, [low, high]")
            return {"low": value[0], "high": value[1]}
        return value


class PPOConfig(PartConfig):
    clip: ClipConfig = Field(ClipConfig(), description="Clip range: one number, or [low, high].")
    dual_clip: float | None = Field(None, gt=1, description="Limit of the ratio for negative advantages.")
    level: Level = Field("token", description="What one ratio is computed over.")
    max_sequence_kl: float | None = Field(
        None,
        gt=0,
        description="Drop negative advantages of sequences further than this from the anchor (nats per token).",
    )

    @field_validator("dual_clip")
    @classmethod
    def _is_beyond_the_clip(cls, dual_clip: float | None, info: Any) -> float | None:
        clip = info.data.get("clip")
        if dual_clip is not None and clip is not None and dual_clip <= 1 + clip.high:
            raise ValueError(f"it must be above 1 + clip.high, which is {1 + clip.high:g}")
        return dual_clip


class PPO(TokenTerm):
    """Metrics: `ratio_mean`, `clip_fraction`."""

    Config = PPOConfig
    compares = True
    uses_advantages = True
    config: PPOConfig

    def __call__(self, view: TokenView) -> Loss:
        config, advantages_N = self.config, view.advantages_N
        ratio_N = log_ratio(view, config.level).exp()
        unclipped_N = ratio_N * advantages_N
        clipped_N = ratio_N.clamp(1.0 - config.clip.low, 1.0 + config.clip.high) * advantages_N
        gain_N = unclipped_N.minimum(clipped_N)
        if config.dual_clip is not None:
            limit_N = config.dual_clip * advantages_N
            gain_N = gain_N.where(advantages_N >= 0, gain_N.maximum(limit_N))
        if config.max_sequence_kl is not None:
            distance_N = -view.sequence_mean(view.log_ratio_N.detach())
            gain_N = gain_N * ((advantages_N >= 0) | (distance_N <= config.max_sequence_kl))
        if config.level == "product":
            _, num_tokens_S, place_N = view.pool(gain_N)
            gain_N = gain_N / num_tokens_S[place_N]
        metrics = {"ratio_mean": ratio_N.detach(), "clip_fraction": (clipped_N < unclipped_N).float()}
        return Loss(-gain_N, metrics)
