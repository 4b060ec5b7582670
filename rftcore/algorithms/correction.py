"""Weights for the mismatch between the engine that sampled and the trainer.

An engine's log-probabilities differ from the trainer's for the same weights (other kernels, another number format), and more so
after a few updates. With d_t = log π_old(o_t) - log π_behavior(o_t), π_old being the trainer's policy before the step, `level` sets over
what one ratio w is computed:

    token      w_t = exp(d_t)                        (truncated importance sampling, Yao et al. 2025)
    sequence   w_t = exp(Σ_t d_t)                    exact, and of high variance for long responses
    geometric  w_t = exp(mean_t d_t)

    truncate   min(w, high)                          importance weights
    mask       1 where low ≤ w ≤ high, else 0        rejection; with `keep_weight` w itself inside the bounds

Weights multiply the policy loss and carry no gradient. A masked token still counts in the loss's denominator. A list of corrections
multiplies their weights, so that rejection of whole responses goes with importance weights of tokens:

    correction: [{name: truncate, level: token, high: 2}, {name: mask, level: geometric, low: 0.99, high: 1.01}]

The metric `correction_kept` is the share of tokens that none of them truncated or masked: a threshold on `sequence` drops long responses
silently otherwise. TRL's `*_mask` modes keep the weight inside the bounds: `keep_weight: true`. Your own correction is a subclass of
`Correction`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from rftcore.algorithms.base import MAX_LOG_RATIO, Part, PartConfig, Signals, StepBatch

if TYPE_CHECKING:
    from torch import Tensor

Level = Literal["token", "sequence", "geometric"]


@dataclass(frozen=True)
class Corrected:
    """The result of a correction.

    Attributes:
        weight_N: float32, without gradient; multiplies the policy loss of each token.
        kept_N: bool; False where the ratio is outside the bounds and was not used itself.
    """

    weight_N: Tensor
    kept_N: Tensor


class Correction(Part, ABC):
    """Weighs tokens once per step, by how the policy before it differs from the one that sampled."""

    needs = frozenset({"old", "behavior"})

    @abstractmethod
    def __call__(self, batch: StepBatch, signals: Signals) -> Corrected:
        """Return the weights of the whole batch; those of tokens that no policy sampled are not read."""


class TruncateConfig(PartConfig):
    level: Level = Field("token", description="What one ratio is computed over.")
    high: float = Field(2.0, gt=1, description="Upper bound of the weight.")


class Truncate(Correction):
    """Importance weights, limited from above."""

    Config = TruncateConfig
    config: TruncateConfig

    def __call__(self, batch: StepBatch, signals: Signals) -> Corrected:
        ratio_N = ratios(self.config.level, batch, signals)
        return Corrected(ratio_N.clamp(max=self.config.high), ratio_N <= self.config.high)


class MaskConfig(PartConfig):
    level: Level = Field("token", description="What one ratio is computed over.")
    low: float = Field(0.0, ge=0, lt=1, description="Smallest ratio that is trained on.")
    high: float = Field(2.0, gt=1, description="Largest ratio that is trained on.")
    keep_weight: bool = Field(False, description="Use the ratio inside the bounds as the weight, instead of 1.")


class Mask(Correction):
    """Removes the gradient of tokens whose ratio is outside the bounds."""

    Config = MaskConfig
    config: MaskConfig

    def __call__(self, batch: StepBatch, signals: Signals) -> Corrected:
        config = self.config
        ratio_N = ratios(config.level, batch, signals)
        kept_N = (ratio_N >= config.low) & (ratio_N <= config.high)
        return Corrected((ratio_N if config.keep_weight else ratio_N.new_ones(len(ratio_N))) * kept_N, kept_N)


def ratios(level: Level, batch: StepBatch, signals: Signals) -> Tensor:
    """Return π_old / π_behavior of each token or of its sequence, float32 [N]; limited to e^±`MAX_LOG_RATIO`."""
    assert signals.old_N is not None
    difference_N = signals.old_N - batch.behavior_N
    if level == "sequence":
        difference_N = batch.sum_per_sequence(difference_N)[batch.sequence_N]
    elif level == "geometric":
        difference_N = batch.mean_per_sequence(difference_N)[batch.sequence_N]
    return difference_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def combined(corrections: Sequence[Correction], batch: StepBatch, signals: Signals) -> tuple[Tensor, dict[str, float]]:
    """Return the product of the weights, float32 [N], and metrics of the batch.

    Args:
        corrections: at least one.
    """
    corrected = [correction(batch, signals) for correction in corrections]
    weight_N, kept_N = corrected[0].weight_N, corrected[0].kept_N
    for other in corrected[1:]:
        weight_N, kept_N = weight_N * other.weight_N, kept_N & other.kept_N
    return weight_N, {"correction_kept": kept_N.float().mean().item() if len(kept_N) else 1.0}
