"""Contrastive preference optimization: DPO without a reference model, and imitation of the chosen response (Xu et al. 2024, arXiv 2401.08417).

    loss = -log σ(β (log π(y_w | x) - log π(y_l | x))) - α / n_w · log π(y_w | x)       n_w tokens

Log-probabilities are summed over the response's tokens. The likelihood is the mean over the tokens of the chosen response, so that every
pair has equal weight.
"""

from __future__ import annotations

from pydantic import Field

from rftcore.algorithms.base import Loss, PairTerm, PartConfig, TokenView
from rftcore.algorithms.losses.pairs import pair_metrics, pooled_pairs


class CPOConfig(PartConfig):
    beta: float = Field(0.1, gt=0, description="Scale of the difference of log-probabilities.")
    nll_coef: float = Field(1.0, ge=0, description="α: weight of the likelihood of the chosen response.")


class CPO(PairTerm):
    """Metrics: `nll` (of the chosen response, per token); and see `pair_metrics`, rewards being β log π."""

    Config = CPOConfig
    config: CPOConfig

    def __call__(self, view: TokenView) -> Loss:
        from torch.nn.functional import logsigmoid

        sums_P2, tokens_P2 = pooled_pairs(view, view.logprobs_N)
        nll_P = -sums_P2[:, 0] / tokens_P2[:, 0].clamp(min=1)
        rewards_P2 = self.config.beta * sums_P2
        loss_P = -logsigmoid(rewards_P2[:, 0] - rewards_P2[:, 1]) + self.config.nll_coef * nll_P
        return Loss(loss_P, {"nll": nll_P.detach()} | pair_metrics(rewards_P2))
