"""Distance from the teacher by the sampled token alone, where the teacher's whole distribution is not available.

With s and t the log-probabilities of the sampled token under student and teacher, and m = log(β e^t + (1 - β) e^s):

    gradient   A = -k (1 - β) (s - m)                  0 < β < 1
               A = k (t - s)                           β = 1: the advantage `teacher`
               A = k (e^(t - s) - 1)                   β = 0
    per-token  A = -k (β (t - m) + (1 - β) (s - m))    0 < β < 1; Trinity-RFT's jsd
               A = -k (s - t) or -k (t - s)            β = 0 or 1

`gradient` is the advantage whose policy gradient under samples of the student is the gradient of the divergence of the loss `jsd`
(arXiv 2306.13649, eq. 1): for a divergence E_s[g(w)], w = e^(t - s), it is -(g - w g'). `per-token` takes the summand at the sampled
token for the reward. At β = ½ that is k log(arithmetic / geometric mean of the two probabilities), which is symmetric in them and
never negative: it also rewards tokens that the teacher finds unlikely. It exists for comparison.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from rftcore.algorithms.advantages.teacher import teacher_difference
from rftcore.algorithms.base import Advantage, Credit, PartConfig, Signals, StepBatch

if TYPE_CHECKING:
    from torch import Tensor


class SampledJSDConfig(PartConfig):
    beta: float = Field(0.5, ge=0, le=1, description="Weight of the teacher in the mixture.")
    coef: float = Field(1.0, gt=0, description="k of the formula.")
    form: Literal["gradient", "per-token"] = Field("gradient", description="Formula of the advantage.")


class SampledJSD(Advantage):
    """Metric: `teacher_kl`, the mean of s - t, nats per token."""

    Config = SampledJSDConfig
    needs = frozenset({"teacher", "behavior"})
    uses_rewards = False
    config: SampledJSDConfig

    def __call__(self, batch: StepBatch, signals: Signals) -> Credit:
        difference_N, metrics = teacher_difference(batch, signals)
        advantages_N = self._gradient(difference_N) if self.config.form == "gradient" else self._per_token(difference_N)
        return Credit(advantages_N=self.config.coef * advantages_N, metrics=metrics)

    def _gradient(self, difference_N: Tensor) -> Tensor:
        beta = self.config.beta
        if beta == 0:
            return difference_N.expm1()
        return difference_N if beta == 1 else (1.0 - beta) * _mixture(difference_N, beta)

    def _per_token(self, difference_N: Tensor) -> Tensor:
        beta = self.config.beta
        if beta in (0, 1):
            return difference_N if beta == 0 else -difference_N
        mixture_N = _mixture(difference_N, beta)
        return mixture_N - beta * difference_N


def _mixture(difference_N: Tensor, beta: float) -> Tensor:
    """Return m - s."""
    return (difference_N + math.log(beta)).logaddexp(difference_N.new_tensor(math.log1p(-beta)))
