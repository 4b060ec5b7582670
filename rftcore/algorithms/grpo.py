"""GRPO: group relative policy optimization (Shao et al. 2024, "DeepSeekMath", arXiv 2402.03300, eq. 3).

For rollout i of a group of G with rewards r:

    A_i     = (r_i - mean(r)) / (std(r) + eps)                                  std with G - 1
    ρ_t     = exp(log π(o_t) - log π_behaviour(o_t))
    loss_t  = -min(ρ_t A, clip(ρ_t, 1 - low, 1 + high) A) + coef · KL_t(π ‖ π_reference)

`high` > `low` is DAPO's clip-higher (Yu et al. 2025, arXiv 2503.14476, section 3.1). π_behaviour is what the engine
recorded when it sampled. Equation 3 averages within a sequence first (`seq-mean-token-mean`); the default here is
DAPO's `token-mean`, which does not favour short answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field, field_validator

from rftcore.algorithms.base import (
    KL_ESTIMATORS,
    MAX_LOG_RATIO,
    Aggregation,
    Algorithm,
    AlgorithmConfig,
    ClipConfig,
    KLConfig,
    TokenBatch,
    TokenLoss,
    refuse_missing_rewards,
)

if TYPE_CHECKING:
    from torch import Tensor


class GRPOConfig(AlgorithmConfig):
    clip: ClipConfig = Field(ClipConfig(), description="Clip range: one number, or [low, high].")
    kl: KLConfig = Field(KLConfig(), description="Penalty for leaving the reference model: {type, coef}.")
    advantage_eps: float = Field(1.0e-6, gt=0, description="Added to the standard deviation of a group's rewards.")
    aggregation: Aggregation = Field("token-mean", description="How tokens are weighed in the loss.")

    @field_validator("clip", mode="before")
    @classmethod
    def _short_forms(cls, value: Any) -> Any:
        return ClipConfig.read(value)


class GRPO(Algorithm):
    """Group relative policy optimization; see the module's header for the formula."""

    Config = GRPOConfig
    name = "grpo"
    min_group_size = 2
    group_relative = True
    uses_behavior_logprobs = True
    config: GRPOConfig

    def __init__(self, config: GRPOConfig | None = None) -> None:
        super().__init__(config)
        self.aggregation = self.config.aggregation

    @property
    def needs_reference(self) -> bool:
        return self.config.kl.coef > 0

    def advantages(self, rewards_B: Tensor, group_index_B: Tensor, rollout_index_B: Tensor) -> Tensor:
        """(r - mean) / (std + eps) within each group; mean and std are over rollouts, each counted once.

        A rollout of several turns counts once, with the mean of its turns' rewards (they are equal unless somebody
        relabelled one turn alone): otherwise long rollouts would shift the baseline of short ones.

        A group of one rollout, or of equal rewards, gets 0: there is nothing to compare, so nothing to learn. Left to
        the formula, one rollout would be NaN (a sample of one has no deviation), and rounding in the mean of equal
        rewards, divided by eps, would be a push of random sign.
        """
        refuse_missing_rewards(rewards_B, group_index_B, rollout_index_B)
        rewards = rewards_B.double()
        advantages_B = rewards.new_zeros(len(rewards))
        for group in group_index_B.unique():
            members = group_index_B == group
            _, rollout = rollout_index_B[members].unique(return_inverse=True)
            turns = rollout.bincount()
            rollout_rewards = rollout.bincount(weights=rewards[members]) / turns
            if len(turns) < 2 or bool(rewards[members].max() == rewards[members].min()):
                continue
            spread = rollout_rewards.std(correction=1)
            centred = rewards[members] - rollout_rewards.mean()
            advantages_B[members] = centred / (spread + self.config.advantage_eps)
        return advantages_B.float()

    def loss(self, tokens: TokenBatch) -> TokenLoss:
        """-min(ρA, clip(ρ)A) per token, plus the penalty.

        Clipping binds upwards for A > 0 and downwards for A < 0 only: a move back towards the behaviour policy always
        counts in full.
        """
        log_ratio = (tokens.logprobs_N - tokens.behavior_logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio = log_ratio.exp()
        clip = self.config.clip
        unclipped = ratio * tokens.advantages_N
        clipped = ratio.clamp(1.0 - clip.low, 1.0 + clip.high) * tokens.advantages_N
        loss = -unclipped.minimum(clipped)
        metrics = {"ratio_mean": ratio.detach(), "clip_fraction": (clipped < unclipped).float()}
        if self.needs_reference:
            assert tokens.reference_logprobs_N is not None
            penalty = KL_ESTIMATORS[self.config.kl.type](tokens.logprobs_N, tokens.reference_logprobs_N)
            loss = loss + self.config.kl.coef * penalty
            metrics["kl_reference"] = penalty.detach()
        return TokenLoss(loss, metrics)
