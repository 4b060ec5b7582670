"""The distance from the reference policy: its estimators, and where it enters.

With x = log q - log p of one sampled token, p the policy and q the reference (J. Schulman 2020, "Approximating KL Divergence"):

    k1         -x                 unbiased, high variance, may be negative; as a loss its mean gradient is 0
    k2         x² / 2             biased, low variance, never negative; its gradient is the one that KL(p ‖ q) has
    k3         e^x - 1 - x        unbiased, low variance, never negative (GRPO, arXiv 2402.03300, eq. 4)
    abs        |x|
    corrected  k3 · min(ρ, 2)     ρ = p / p_anchor corrects for who sampled (Trinity-RFT's corrected_k3; TRL's
                                  use_bias_correction_kl has no limit on ρ)

In the loss, coef · KL is added at each token. In the reward, coef · KL(p_anchor) is subtracted from each token's reward before
advantages are computed (InstructGPT, arXiv 2203.02155). `target` turns the coefficient into a controller (arXiv 1909.08593,
section 2.2): after a step it is multiplied by 1 + clip(KL / target - 1, ±0.2) · B / horizon, B the number of sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from rftcore.algorithms.base import MAX_LOG_RATIO
from rftdata.config import Section

if TYPE_CHECKING:
    from torch import Tensor

Estimator = Literal["k1", "k2", "k3", "abs", "corrected"]

_MAX_CORRECTION = 2.0
_MAX_CHANGE = 0.2


class KLConfig(Section):
    type: Literal["none"] | Estimator = Field("none", description="Estimator; none loads no reference model.")
    coef: float = Field(0.0, ge=0, description="Weight of the penalty; 0 loads no reference model.")
    where: Literal["loss", "reward"] = Field("loss", description="Added to the loss, or subtracted from rewards.")
    target: float | None = Field(None, gt=0, description="Adapt the coefficient until the KL per token is this (nats).")
    horizon: float = Field(10_000.0, gt=0, description="Sequences over which the coefficient adapts.")

    @model_validator(mode="after")
    def _has_an_estimator(self) -> KLConfig:
        if self.coef > 0 and self.type == "none":
            raise ValueError(
                "a coefficient without an estimator does nothing; set kl.type to k1, k2, k3, abs or corrected"
            )
        if self.target is not None and self.coef == 0:
            raise ValueError("a target needs a coefficient to begin with; set kl.coef above 0")
        if self.where == "reward" and self.type == "corrected":
            raise ValueError(
                "corrected is for the loss: in the reward the anchor policy itself is measured; use k1, k2 or k3"
            )
        return self

    @property
    def is_on(self) -> bool:
        return self.coef > 0


def estimate(kind: Estimator, logprobs: Tensor, reference: Tensor, anchor: Tensor | None = None) -> Tensor:
    """The estimate at each token, nats.

    Args:
        logprobs, reference: log-probabilities under p and q.
        anchor: under the policy that sampled; `corrected` reads it.
    """
    if kind == "k1":
        return logprobs - reference
    if kind == "abs":
        return (logprobs - reference).abs()
    if kind == "k2":
        return 0.5 * (logprobs - reference).square()
    x = (reference - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    k3: Tensor = x.expm1() - x
    if kind == "k3":
        return k3
    assert anchor is not None
    ratio = (logprobs - anchor).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return k3 * ratio.clamp(max=_MAX_CORRECTION)


def adapted(coef: float, config: KLConfig, measured: float, num_sequences: int) -> float:
    """The coefficient after a step in which the mean KL per token was `measured` nats."""
    if config.target is None:
        return coef
    error = min(max(measured / config.target - 1.0, -_MAX_CHANGE), _MAX_CHANGE)
    return coef * (1.0 + error * num_sequences / config.horizon)
