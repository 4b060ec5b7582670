"""Distance from the teacher's whole distribution at each token (Agarwal et al. 2023, "GKD", arXiv 2306.13649, eq. 1).

With s the policy's and t the teacher's distribution over the vocabulary, and m = β t + (1 - β) s:

    0 < β < 1   β KL(t ‖ m) + (1 - β) KL(s ‖ m)     generalised Jensen-Shannon divergence, at most log 2
    β = 0       KL(t ‖ s)                           forward: the policy covers what the teacher does
    β = 1       KL(s ‖ t)                           reverse: the policy keeps to the teacher's main modes
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pydantic import Field

from rftcore.algorithms.base import HeadTerm, PartConfig

if TYPE_CHECKING:
    from torch import Tensor

# A token that one of the two excludes (logit -inf) has probability 0 and would give 0 · inf. e^-100 is 0 in float32.
_MIN_LOGPROB = -100.0


class JSDConfig(PartConfig):
    beta: float = Field(0.5, ge=0, le=1, description="Weight of the teacher in the mixture.")


class JSD(HeadTerm):
    Config = JSDConfig
    config: JSDConfig

    def read(self, logits_RV: Tensor, teacher_logits_RV: Tensor | None) -> Tensor:
        assert teacher_logits_RV is not None
        beta = self.config.beta
        s_RV, t_RV = (x.log_softmax(dim=-1).clamp(min=_MIN_LOGPROB) for x in (logits_RV, teacher_logits_RV))
        if beta == 0:
            return _kl(t_RV, s_RV)
        if beta == 1:
            return _kl(s_RV, t_RV)
        m_RV = (t_RV + math.log(beta)).logaddexp(s_RV + math.log1p(-beta))
        return beta * _kl(t_RV, m_RV) + (1.0 - beta) * _kl(s_RV, m_RV)


def _kl(p_RV: Tensor, q_RV: Tensor) -> Tensor:
    """Compute KL(p ‖ q) of each row of log-probabilities, nats."""
    return (p_RV.exp() * (p_RV - q_RV)).sum(dim=-1)
