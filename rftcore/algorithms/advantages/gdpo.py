"""Several rewards, each compared within the group alone: GDPO (Liu et al. 2026, arXiv 2601.05242).

For the rewards r_k of rollout i:

    N_k = (r_k - mean(r_k)) / (std(r_k) + eps)        within the group, 0 where the group's rollouts have equal r_k
    S   = Σ_k weight_k N_k
    A   = (S - mean(S)) / (std(S) + eps)              over the rollouts of the batch

If rewards are summed before the comparison, as in `group`, those that vary most dominate, and rollouts with different rewards of the same
sum get the same advantage. The rewards are those of the functions of `explorer.reward` (the entries of a mapping count separately), as they
were sampled: labels and stages that change the reward do not change them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from rftcore.algorithms.advantages.rollouts import last_sequences, normalised, rollouts
from rftcore.algorithms.base import Advantage, Credit, PartConfig, Signals, StepBatch
from rftdata.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


class GDPOConfig(PartConfig):
    weights: dict[str, float] = Field(
        {}, description="Weight of each reward by its name; 1 for those that are not named."
    )
    eps: float = Field(1.0e-6, gt=0, description="Added to standard deviations.")


class GDPO(Advantage):
    """The rewards of a rollout are those of its last turn. Metrics: `reward_NAME`, the mean of each."""

    Config = GDPOConfig
    config: GDPOConfig
    columns = frozenset({"reward_parts"})
    min_group_size = 2

    def __call__(self, batch: StepBatch, signals: Signals) -> Credit:
        assert batch.reward_parts_B is not None
        unknown = sorted(self.config.weights.keys() - set(batch.reward_names))
        if unknown:
            raise ConfigError(
                "algorithm.advantage.weights names a reward that rollouts do not have",
                value=unknown[0],
                allowed=", ".join(batch.reward_names),
                todo="correct the name",
            )
        last_R = last_sequences(batch)
        parts_R, group_R = batch.reward_parts_B.double()[last_R], batch.group_B[last_R]
        sum_R = parts_R.new_zeros(len(parts_R))
        for place, name in enumerate(batch.reward_names):
            weight = self.config.weights.get(name, 1.0)
            sum_R = sum_R + weight * normalised(parts_R[:, place], group_R, scale=True, eps=self.config.eps)
        advantages_R = normalised(sum_R, sum_R.new_zeros(len(sum_R)).long(), scale=True, eps=self.config.eps)
        metrics = {f"reward_{name}": _mean(parts_R[:, place]) for place, name in enumerate(batch.reward_names)}
        return Credit(advantages_N=advantages_R[rollouts(batch)][batch.sequence_N].float(), metrics=metrics)


def _mean(values: Tensor) -> float:
    return values.mean().item() if len(values) else 0.0
