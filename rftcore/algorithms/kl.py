"""The distance from the reference policy: its estimators, and where it enters.

With x = log q - log p of one sampled token, p the policy and q the reference (J. Schulman 2020, "Approximating KL Divergence"):

    k1         -x                 unbiased, high variance, may be negative; as a loss its mean gradient is 0
    k2         x² / 2             biased, low variance, never negative; its gradient is the one that KL(p ‖ q) has
    k3         e^x - 1 - x        unbiased, low variance, never negative (GRPO, arXiv 2402.03300, eq. 4)
    abs        |x|
    corrected  k3 · min(ρ, 2)     ρ = p / p_anchor corrects for who sampled (Trinity-RFT's corrected_k3; TRL's
                                  use_bias_correction_kl has no limit on ρ)

In the loss, coef · KL is added at each token. `straight_through` gives any of them the gradient of k2: value + k2 - sg(k2), sg for a
stopped gradient, as verl does for names that end in + (`kl_penalty` of its verl/trainer/ppo/core_algos.py). On samples of the policy
itself the value is then unbiased with k1 or k3, and the gradient with all of them. In the reward, coef · KL(p_anchor) is subtracted from
each token's reward before advantages are computed (InstructGPT, arXiv 2203.02155). `target` turns the coefficient into a controller (arXiv
1909.08593, section 2.2): after a step it is multiplied by 1 + clip(KL / target - 1, ±0.2) · B / horizon, B the number of sequences.

Your own estimator is a subclass of `KLEstimator`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from rftcore.algorithms.base import MAX_LOG_RATIO, Part
from rftcore.algorithms.choice import PartChoice
from rftdata.config import Section

if TYPE_CHECKING:
    from torch import Tensor

_MAX_CORRECTION = 2.0
_MAX_CHANGE = 0.2


class KLConfig(Section):
    type: PartChoice | None = Field(
        None, description="Estimator: k1, k2, k3, abs, corrected or your own; none loads no reference model."
    )
    coef: float = Field(0.0, ge=0, description="Weight of the penalty; 0 loads no reference model.")
    where: Literal["loss", "reward"] = Field("loss", description="Added to the loss, or subtracted from rewards.")
    straight_through: bool = Field(False, description="Give the penalty of the loss the gradient of k2.")
    target: float | None = Field(None, gt=0, description="Adapt the coefficient until the KL per token is this (nats).")
    horizon: float = Field(10_000.0, gt=0, description="Sequences over which the coefficient adapts.")

    @field_validator("type", mode="before")
    @classmethod
    def _none_is_no_estimator(cls, value: object) -> object:
        return None if value == "none" else value

    @model_validator(mode="after")
    def _has_an_estimator(self) -> KLConfig:
        if self.coef > 0 and self.type is None:
            raise ValueError(
                "a coefficient without an estimator does nothing; set kl.type to k1, k2, k3, abs or corrected"
            )
        if self.target is not None and self.coef == 0:
            raise ValueError("a target needs a coefficient to begin with; set kl.coef above 0")
        if self.where == "reward" and self.straight_through:
            raise ValueError("straight_through is for the loss: a reward has no gradient")
        return self

    @property
    def is_on(self) -> bool:
        return self.coef > 0


class KLEstimator(Part, ABC):
    """Estimates the distance of a policy from another one at sampled tokens.

    Attributes:
        compares: it reads the anchor, and so is for the loss only.
    """

    compares: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, logprobs_N: Tensor, reference_N: Tensor, anchor_N: Tensor) -> Tensor:
        """Return the estimate at each token, nats, [N].

        Args:
            logprobs_N: log-probability under the policy; carries the gradient in the loss.
            reference_N: under the reference.
            anchor_N: under the policy that ratios compare with. In the reward it is that of `logprobs_N`.
        """


class K1(KLEstimator):
    """log p - log q."""

    def __call__(self, logprobs_N: Tensor, reference_N: Tensor, anchor_N: Tensor) -> Tensor:
        return logprobs_N - reference_N


class K2(KLEstimator):
    """½ (log p - log q)²."""

    def __call__(self, logprobs_N: Tensor, reference_N: Tensor, anchor_N: Tensor) -> Tensor:
        return k2(logprobs_N, reference_N)


class K3(KLEstimator):
    """q / p - 1 - log(q / p)."""

    def __call__(self, logprobs_N: Tensor, reference_N: Tensor, anchor_N: Tensor) -> Tensor:
        return k3(logprobs_N, reference_N)


class Absolute(KLEstimator):
    """|log p - log q|."""

    def __call__(self, logprobs_N: Tensor, reference_N: Tensor, anchor_N: Tensor) -> Tensor:
        return (logprobs_N - reference_N).abs()


class Corrected(KLEstimator):
    """k3 · min(ρ, 2); for the loss only."""

    compares = True

    def __call__(self, logprobs_N: Tensor, reference_N: Tensor, anchor_N: Tensor) -> Tensor:
        ratio_N = (logprobs_N - anchor_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        return k3(logprobs_N, reference_N) * ratio_N.clamp(max=_MAX_CORRECTION)


def k2(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """Return half the square of the log-ratio."""
    return 0.5 * (logprobs_N - reference_N).square()


def k3(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """Compute e^x - 1 - x; finite also for policies that have nothing in common."""
    x_N = (reference_N - logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return x_N.expm1() - x_N


def with_gradient_of_k2(values_N: Tensor, logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """Return the same values with the gradient of k2."""
    backward_N = k2(logprobs_N, reference_N)
    return values_N.detach() + backward_N - backward_N.detach()


def adapted(coef: float, config: KLConfig, measured: float, num_sequences: int) -> float:
    """Return the coefficient after a step in which the mean KL per token was `measured` nats."""
    if config.target is None:
        return coef
    error = min(max(measured / config.target - 1.0, -_MAX_CHANGE), _MAX_CHANGE)
    return coef * (1.0 + error * num_sequences / config.horizon)
