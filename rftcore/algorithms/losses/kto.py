"""Kahneman-Tversky optimization: from single responses that are desirable or not, without pairs (arXiv 2402.01306, eq. 7).

    r(y)         = log π(y | x) - log π_reference(y | x)      summed over the response's tokens
    z            = max(0, mean of r over mismatched pairs)    prompts with responses to other prompts, no gradient
    desirable    λ_D (1 - σ(β (r - z)))
    undesirable  λ_U (1 - σ(β (z - r)))

z estimates KL(π ‖ π_reference), from which gains and losses are counted. A response is desirable when its reward is above
`threshold`. The paper advises λ such that λ_D · (number of desirable) is 1 to 4/3 of λ_U · (number of undesirable).
"""

from __future__ import annotations

from pydantic import Field

from rftcore.algorithms.base import Loss, PartConfig, SequenceTerm, TokenView


class KTOConfig(PartConfig):
    beta: float = Field(0.1, gt=0, description="How closely the policy is held to the reference model.")
    threshold: float = Field(0.0, description="A response is desirable when its reward is above it.")
    desirable_weight: float = Field(1.0, ge=0, description="λ_D.")
    undesirable_weight: float = Field(1.0, ge=0, description="λ_U.")


class KTO(SequenceTerm):
    """Metrics: `implied_reward` (β r), `desirable` (share), `kto_accuracy` (share on the right side of z)."""

    Config = KTOConfig
    needs = frozenset({"reference", "mismatched"})
    uses_rewards = True
    config: KTOConfig

    def __call__(self, view: TokenView) -> Loss:
        config = self.config
        assert view.reference_N is not None and view.rewards_N is not None and view.mismatched_kl is not None
        log_ratio_S, _, place_N = view.pool(view.logprobs_N - view.reference_N)
        # Every token has its sequence's reward; a mean of equal numbers could round to the other side of the threshold.
        rewards_S = view.rewards_N.new_zeros(len(log_ratio_S)).scatter(0, place_N, view.rewards_N)
        desirable_S = rewards_S > config.threshold
        sign_S = desirable_S.float() * 2.0 - 1.0
        gain_S = config.beta * sign_S * (log_ratio_S - view.mismatched_kl.clamp(min=0.0))
        weight_S = sign_S.new_full((), config.undesirable_weight).where(~desirable_S, config.desirable_weight)
        metrics = {
            "implied_reward": config.beta * log_ratio_S.detach(),
            "desirable": desirable_S.float(),
            "kto_accuracy": (gain_S.detach() > 0).float(),
        }
        return Loss(weight_S * (-gain_S).sigmoid(), metrics)
