"""The tokens that lower the entropy most: those of large covariance of log-probability and advantage (Cui et al. 2025, arXiv 2505.22617).

    C_t = (A_t - mean(A)) (log π(o_t) - mean(log π))      means over the batch's tokens

π is the policy before the step, or with `policy: update` that before each optimizer update.

    largest    the share of tokens with the largest C; equal ones are drawn   KL-Cov
    random     tokens with low < C < high, drawn until there are this share   Clip-Cov

At least one is chosen, if any is eligible. With the loss ppo they give no gradient (Clip-Cov); the loss kl_cov adds a penalty at them (KL-Cov). Draws
depend on the step and on the token alone (github.com/PRIME-RL/Entropy-Mechanism-of-RL, verl/trainer/ppo/core_algos.py at 8850579).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from rftcore.algorithms.base import PartConfig, Signals, StepBatch, TokenMask

if TYPE_CHECKING:
    from torch import Tensor


class CovConfig(PartConfig):
    choose: Literal["largest", "random"] = Field("largest", description="Which tokens are chosen.")
    share: float = Field(2.0e-3, gt=0, le=1, description="Largest share of the batch's tokens that is chosen.")
    low: float = Field(1.0, description="random: C is above this.")
    high: float = Field(5.0, description="random: C is below this.")
    policy: Literal["step", "update"] = Field(
        "step", description="Policy whose log-probabilities are read: the one before the step, or before each update."
    )


class Cov(TokenMask):
    Config = CovConfig
    needs = frozenset({"old"})
    config: CovConfig

    @property
    def each_update(self) -> bool:  # type: ignore[override]  # a class attribute where it is the same for all configurations
        return self.config.policy == "update"

    def __call__(self, batch: StepBatch, signals: Signals, advantages_N: Tensor) -> Tensor:
        assert signals.old_N is not None
        kept_N = advantages_N.new_ones(len(advantages_N)).bool()
        if not len(kept_N):
            return kept_N
        a_N, logprobs_N = advantages_N.double(), signals.old_N.double()
        covariance_N = (a_N - a_N.mean()) * (logprobs_N - logprobs_N.mean())
        num = max(1, int(self.config.share * len(kept_N)))
        drawn = lots(batch).argsort()
        if self.config.choose == "largest":  # equal ones in the order of their lots
            drawn = drawn[covariance_N[drawn].argsort(descending=True, stable=True)]
        else:
            drawn = drawn[((covariance_N > self.config.low) & (covariance_N < self.config.high))[drawn]]
        kept_N[drawn[:num]] = False
        return kept_N


def lots(batch: StepBatch) -> Tensor:
    """Compute a pseudo-random number for each token, int64 [N], from the step and the token's position; the order of the batch does not matter."""
    import torch

    starts_B = batch.tokens_B.cumsum(0) - batch.tokens_B
    place_N = torch.arange(len(batch.sequence_N)) - starts_B[batch.sequence_N]
    of_sequence_B = _mixed(_mixed(_mixed(batch.group_B + (batch.step << 32)) + batch.rollout_B) + batch.turn_BA[:, 0])
    return _mixed(of_sequence_B[batch.sequence_N] + place_N)


def _mixed(x: Tensor) -> Tensor:
    """Scramble the bits of each number (the finaliser of SplitMix64, Steele et al. 2014; products wrap around)."""
    x = (x ^ (x >> 30)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27)) * -0x6B2FB644ECCEEE15
    return x ^ (x >> 31)
