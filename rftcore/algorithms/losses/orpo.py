"""Odds ratio preference optimization: imitation of the chosen response and a push between the two (arXiv 2403.07691, eq. 6 and 7).

    p(y)  = exp(mean_t log π(y_t | x, y_<t))      geometric mean of the tokens' probabilities
    loss  = -log p(y_w) - λ log σ(log [p(y_w) / (1 - p(y_w))] - log [p(y_l) / (1 - p(y_l))])

No reference model. The first summand is the mean over the tokens of the chosen response, so every pair has equal weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from rftcore.algorithms.base import Loss, PairTerm, PartConfig, TokenView
from rftcore.algorithms.losses.pairs import pair_metrics, pooled_pairs

if TYPE_CHECKING:
    from torch import Tensor

# Nearer to 0 the odds of a certain response are infinite, and so is the gradient.
_MAX_MEAN_LOGPROB = -1.0e-6
_LOG_HALF = -0.6931471805599453


class ORPOConfig(PartConfig):
    odds_coef: float = Field(0.1, ge=0, description="λ: weight of the odds ratio.")


class ORPO(PairTerm):
    """Metrics: `nll` (of the chosen response, per token), `log_odds_ratio`; and see `pair_metrics`, rewards being λ log p."""

    Config = ORPOConfig
    config: ORPOConfig

    def __call__(self, view: TokenView) -> Loss:
        from torch.nn.functional import logsigmoid

        sums_P2, tokens_P2 = pooled_pairs(view, view.logprobs_N)
        means_P2 = sums_P2 / tokens_P2.clamp(min=1)
        bounded_P2 = means_P2.clamp(max=_MAX_MEAN_LOGPROB)
        odds_P2 = bounded_P2 - log1mexp(bounded_P2)
        log_ratio_P = odds_P2[:, 0] - odds_P2[:, 1]
        metrics = {"nll": -means_P2[:, 0].detach(), "log_odds_ratio": log_ratio_P.detach()}
        loss_P = -means_P2[:, 0] - self.config.odds_coef * logsigmoid(log_ratio_P)
        return Loss(loss_P, metrics | pair_metrics(self.config.odds_coef * means_P2))


def log1mexp(x: Tensor) -> Tensor:
    """Compute log(1 - e^x) for x < 0, exact near 0 and far from it (M. Mächler 2012, "Accurately computing log(1 - exp(-|a|))")."""
    near, far = x.clamp(min=_LOG_HALF), x.clamp(max=_LOG_HALF)
    return (-near.expm1()).log().where(x > _LOG_HALF, (-far.exp()).log1p())
