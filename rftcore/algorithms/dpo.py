"""DPO: direct preference optimization (Rafailov et al. 2023, arXiv 2305.18290, eq. 7).

For a pair of responses y_w (chosen) over y_l (rejected) to a prompt x:

    r(y)  = log π(y | x) - log π_reference(y | x)            summed over the response's tokens that count
    h     = β (r(y_w) - r(y_l))
    loss  = -log σ(h)

averaged over the pairs of a batch. π_reference is the model the run started from. β r(y) is the reward that the policy
implies (section 4 of the paper), h the margin between the two.

`label_smoothing` ε allows for a share ε of pairs that are the wrong way round (conservative DPO; E. Mitchell 2023, "A note
on DPO with noisy preferences & relationship to IPO", eq. 3):

    loss  = -(1 - ε) log σ(h) - ε log σ(-h)

`length_normalised` divides r(y) by the number of the response's tokens, so that h is no larger for long responses (used by
Tülu 3, arXiv 2411.15124, section 5); β then wants to be about as many times larger as responses have tokens.
"""

from __future__ import annotations

from pydantic import Field

from rftcore.algorithms.base import AlgorithmConfig, PairAlgorithm, PairBatch, PairLoss


class DPOConfig(AlgorithmConfig):
    beta: float = Field(0.1, gt=0, description="How closely the policy is held to the reference model.")
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="Share of pairs taken to be the wrong way round (conservative DPO)."
    )
    length_normalised: bool = Field(False, description="Log-ratios per token instead of per response.")


class DPO(PairAlgorithm):
    """Direct preference optimization; see the module's header for the formula."""

    Config = DPOConfig
    name = "dpo"
    config: DPOConfig

    def pair_loss(self, pairs: PairBatch) -> PairLoss:
        """-(1 - ε) log σ(h) - ε log σ(-h).

        Metrics: `chosen_reward` and `rejected_reward` (β r, nats), `pair_margin` (h), `pair_accuracy` (share with h > 0).
        """
        from torch.nn.functional import logsigmoid

        chosen_P = pairs.chosen_logprobs_P - pairs.chosen_reference_P
        rejected_P = pairs.rejected_logprobs_P - pairs.rejected_reference_P
        if self.config.length_normalised:
            chosen_P = chosen_P / pairs.chosen_tokens_P.clamp(min=1)
            rejected_P = rejected_P / pairs.rejected_tokens_P.clamp(min=1)
        margin_P = self.config.beta * (chosen_P - rejected_P)
        smoothing = self.config.label_smoothing
        loss_P = -(1.0 - smoothing) * logsigmoid(margin_P) - smoothing * logsigmoid(-margin_P)
        margin_P = margin_P.detach()
        metrics = {
            "chosen_reward": self.config.beta * chosen_P.detach(),
            "rejected_reward": self.config.beta * rejected_P.detach(),
            "pair_margin": margin_P,
            "pair_accuracy": (margin_P > 0).float(),
        }
        return PairLoss(loss_P, metrics)
