"""Simple preference optimization: the reward is the mean log-probability, without a reference model (arXiv 2405.14734, eq. 6).

    r(y)  = β mean_t log π(y_t | x, y_<t)
    loss  = -log σ(r(y_w) - r(y_l) - γ)

The paper's β is 2 to 2.5 and γ about half of it.
"""

from __future__ import annotations

from pydantic import Field

from rftcore.algorithms.base import Loss, PairTerm, PartConfig, TokenView
from rftcore.algorithms.losses.pairs import pair_metrics, pooled_pairs


class SimPOConfig(PartConfig):
    beta: float = Field(2.0, gt=0, description="Scale of the rewards.")
    gamma: float = Field(1.0, ge=0, description="Margin by which the chosen response's reward is to be higher.")


class SimPO(PairTerm):
    """Metrics: see `pair_metrics`."""

    Config = SimPOConfig
    config: SimPOConfig

    def __call__(self, view: TokenView) -> Loss:
        from torch.nn.functional import logsigmoid

        sums_P2, tokens_P2 = pooled_pairs(view, view.logprobs_N)
        rewards_P2 = self.config.beta * sums_P2 / tokens_P2.clamp(min=1)
        margin_P = rewards_P2[:, 0] - rewards_P2[:, 1] - self.config.gamma
        return Loss(-logsigmoid(margin_P), pair_metrics(rewards_P2))
