"""The reward model: scores whose difference is the log-odds of a preference (Bradley and Terry 1952; InstructGPT, arXiv 2203.02155, eq. 1).

    loss = -log σ(s_w - s_l - m) + c (s_w + s_l)²

s is the score of a prompt with a response: the scalar head at its last token. m = `margin` + `reward_margin` · (r_w - r_l), with r the
recorded rewards, asks for a larger difference where the preference is clearer (Llama 2, arXiv 2307.09288, eq. 2). c keeps scores
around 0 (arXiv 2312.09244, eq. 2), since the first summand fixes only differences.
"""

from __future__ import annotations

from pydantic import Field

from rftcore.algorithms.base import Loss, PairTerm, PartConfig, TokenView
from rftcore.algorithms.losses.pairs import pair_metrics, pooled_pairs


class BradleyTerryConfig(PartConfig):
    margin: float = Field(0.0, ge=0, description="Required difference of scores.")
    reward_margin: float = Field(
        0.0, ge=0, description="Required difference of scores per unit of difference between recorded rewards."
    )
    centering: float = Field(0.0, ge=0, description="c: holds the scores of a pair around 0; 0.01 is usual.")


class BradleyTerry(PairTerm):
    """Metrics: see `pair_metrics`; rewards are the scores."""

    Config = BradleyTerryConfig
    of_scorer = True
    config: BradleyTerryConfig

    @property
    def uses_rewards(self) -> bool:  # type: ignore[override]  # a class attribute where it is the same for all configurations
        return self.config.reward_margin > 0

    def __call__(self, view: TokenView) -> Loss:
        from torch.nn.functional import logsigmoid

        config = self.config
        assert view.values_N is not None
        scores_P2, _ = pooled_pairs(view, view.values_N)
        difference_P = scores_P2[:, 0] - scores_P2[:, 1] - config.margin
        if config.reward_margin:
            assert view.rewards_N is not None
            rewards_P2, _ = pooled_pairs(view, view.rewards_N)
            difference_P = difference_P - config.reward_margin * (rewards_P2[:, 0] - rewards_P2[:, 1])
        loss_P = -logsigmoid(difference_P) + config.centering * scores_P2.sum(dim=1).square()
        return Loss(loss_P, pair_metrics(scores_P2))
