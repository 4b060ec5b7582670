"""Importance weights for the mismatch between the engine that sampled and the trainer.

An engine's log-probabilities differ from the trainer's for the same weights (other kernels, another number format), and more so
after a few updates. With d_t = log π_old(o_t) - log π_behavior(o_t), π_old being the trainer's policy before the step:

    token      w_t = exp(d_t)                        (truncated importance sampling, Yao et al. 2025)
    sequence   w_t = exp(Σ_t d_t)                    exact, and of high variance for long responses
    geometric  w_t = exp(mean_t d_t)

`truncate` limits w to `high`. `mask` sets w to 0 outside [low, high] and to 1 inside. The weights multiply the policy loss and carry
no gradient. A masked token still counts in the loss's denominator. The metric `correction_kept` is the share of tokens whose weight
was neither truncated nor masked: a threshold on `sequence` drops long responses silently otherwise.

TRL applies the weight itself inside the bounds of its `*_mask` modes; `keep_weight: true` does the same here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from rftcore.algorithms.base import MAX_LOG_RATIO, Signals, StepBatch
from rftdata.config import Section

if TYPE_CHECKING:
    from torch import Tensor


class CorrectionConfig(Section):
    level: Literal["token", "sequence", "geometric"] = Field("token", description="What one weight is computed over.")
    mode: Literal["truncate", "mask"] = Field("truncate", description="What happens to weights outside the bounds.")
    high: float = Field(2.0, gt=1, description="Upper bound of the weight.")
    low: float = Field(0.0, ge=0, lt=1, description="Lower bound of the weight; mask only.")
    keep_weight: bool = Field(False, description="mask: use the weight inside the bounds instead of 1.")

    @model_validator(mode="after")
    def _keys_fit_the_mode(self) -> CorrectionConfig:
        if self.mode == "truncate" and (self.low > 0 or self.keep_weight):
            raise ValueError("low and keep_weight are for mode: mask; truncate limits the weight from above only")
        return self


def weights(config: CorrectionConfig, batch: StepBatch, signals: Signals) -> tuple[Tensor, dict[str, float]]:
    """Weight of each token, float32 [N] without gradient, and metrics of the batch."""
    assert signals.old_N is not None
    difference_N = signals.old_N - batch.behavior_N
    if config.level == "sequence":
        difference_N = batch.sum_per_sequence(difference_N)[batch.sequence_N]
    elif config.level == "geometric":
        difference_N = batch.mean_per_sequence(difference_N)[batch.sequence_N]
    weight_N = difference_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    kept_N = (weight_N <= config.high) & (weight_N >= config.low)
    metrics = {"correction_kept": kept_N.float().mean().item() if len(kept_N) else 1.0}
    if config.mode == "truncate":
        return weight_N.clamp(max=config.high), metrics
    return (weight_N if config.keep_weight else weight_N.new_ones(len(weight_N))) * kept_N, metrics
