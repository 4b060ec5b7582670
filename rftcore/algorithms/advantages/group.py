"""Rewards compared within the group: GRPO, RLOO, OPO, OPMD, AsymRE, GPG and plain REINFORCE differ in the baseline and the scale.

For rollout i of a group of G with rewards r:

    A_i = (r_i - b - shift) / (s + eps)

    baseline  mean               b = mean(r)                                  GRPO (arXiv 2402.03300, section 4.1)
              leave-one-out      b = mean of the others' rewards              RLOO (arXiv 2402.14740, eq. 8)
              length-weighted    b = Σ l r / Σ l, l the tokens of a rollout        OPO (arXiv 2505.23585)
              log-mean-exp       b = τ log mean exp(r / τ)                    OPMD (arXiv 2505.17826, appendix)
              none               b = 0                                        REINFORCE
    scale     group              s = std(r) with G - 1                        GRPO
              batch              s = std of all rollouts' rewards in the batch
              none               s + eps = 1                                  Dr. GRPO (arXiv 2503.20783)

`shift` is AsymRE's (arXiv 2506.20520): a negative one raises every advantage. `skip_std` gives groups with std(r) at or
below it no gradient. `rescale` divides all advantages by the share of rollouts whose group has different rewards, so that groups without
a gradient do not make the step smaller (GPG, arXiv 2504.02546). `rank_penalty` p lowers the rewards from which mean and std are computed
to r (1 - p k / G), k = 0 … G - 1 the rank of the rollout by mean behaviour log-probability, the most likely first with the highest k
(Trinity-RFT).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from rftcore.algorithms.advantages.rollouts import groups, rollout_means, sums, total_rewards
from rftcore.algorithms.base import Advantage, Credit, PartConfig, Signal, Signals, StepBatch

if TYPE_CHECKING:
    from torch import Tensor


# Means of the same rewards in another order differ by less, relative to the largest.
_ROUNDING = 1e-12


class GroupConfig(PartConfig):
    baseline: Literal["mean", "leave-one-out", "length-weighted", "log-mean-exp", "none"] = Field(
        "mean", description="b of the formula."
    )
    scale: Literal["group", "batch", "none"] = Field("group", description="s of the formula.")
    eps: float = Field(1.0e-6, gt=0, description="Added to s.")
    shift: float = Field(0.0, description="Added to the baseline.")
    tau: float = Field(1.0, gt=0, description="τ of log-mean-exp.")
    skip_std: float | None = Field(
        None, ge=0, description="Groups with a standard deviation up to this give no gradient."
    )
    rescale: bool = Field(False, description="Divide by the share of rollouts whose group has different rewards.")
    rank_penalty: float = Field(0.0, ge=0, le=1, description="p of the formula.")


class Group(Advantage):
    """Compares rollouts: each counts once, with the mean reward of its rows.

    Rows of a rollout have equal rewards unless one alone was relabelled. If every row counted, rollouts with many branches would shift the
    baseline of others. With `scale: group`, a group of one rollout or of equal rewards has advantage 0: nothing differs, and a rounding error
    in the mean of equal rewards, divided by eps, would have a random sign.
    """

    Config = GroupConfig
    config: GroupConfig

    @property
    def min_group_size(self) -> int:  # type: ignore[override]  # a class attribute where it is the same for all configurations
        return 1 if self.config.baseline == "none" and self.config.scale != "group" else 2

    @property
    def signals(self) -> frozenset[Signal]:
        return frozenset({"behavior"}) if self.config.rank_penalty else frozenset()

    def __call__(self, batch: StepBatch, signals: Signals) -> Credit:
        config = self.config
        rewards_B = total_rewards(batch).double()
        advantages_B = rewards_B.new_zeros(len(rewards_B))
        all_rollouts = [rollout_means(rewards_B[members], batch.rollout_B[members]) for members in groups(batch)]
        batch_std = _std(_concatenated(all_rollouts)) if config.scale == "batch" else None
        tokens_B = batch.tokens_B.double()
        skipped, differing = 0, 0
        for members, rollouts in zip(groups(batch), all_rollouts, strict=True):
            rewards = rewards_B[members]
            is_equal = len(rollouts) < 2 or bool(rewards.max() == rewards.min())
            differing += 0 if is_equal else len(rollouts)
            if is_equal and config.scale == "group":
                skipped += 1
                continue
            if config.rank_penalty:
                likelihood = batch.mean_per_sequence(batch.behavior_N.nan_to_num(nan=0.0)).double()[members]
                rollouts = self._penalised(rollouts, rollout_means(likelihood, batch.rollout_B[members]))
            if config.skip_std is not None and float(_std(rollouts)) <= config.skip_std:
                skipped += 1
                continue
            scale = {"group": _std(rollouts), "batch": batch_std, "none": None}[config.scale]
            if scale is not None and float(scale) == 0.0:
                skipped += 1  # rollouts are equal on average, although their turns may differ
                continue
            centred = self._centred(rewards, rollouts, tokens_B[members], batch.rollout_B[members])
            if is_equal and config.baseline != "none":
                centred = centred.zero_()  # exactly 0, without rounding
            centred = centred - config.shift
            advantages_B[members] = centred if scale is None else centred / (scale + config.eps)
        if config.rescale and differing:
            advantages_B = advantages_B * (sum(map(len, all_rollouts)) / differing)
        metrics = {"groups_without_gradient": skipped / max(1, len(all_rollouts))}
        return Credit(advantages_N=advantages_B.float()[batch.sequence_N], metrics=metrics)

    def _centred(self, rewards: Tensor, rollouts: Tensor, tokens: Tensor, rollout: Tensor) -> Tensor:
        """Subtract the baseline from the rewards of a group.

        Args:
            rollouts: the reward of each rollout.
            tokens, rollout: the number of tokens, and the rollout, of each sequence.
        """
        if self.config.baseline != "length-weighted":
            return _BASELINES[self.config.baseline](rewards, rollouts, self.config.tau)
        lengths = sums(tokens, rollout.unique(return_inverse=True)[1])
        return rewards - (lengths * rollouts).sum() / lengths.sum().clamp(min=1)

    def _penalised(self, rollouts: Tensor, likelihood: Tensor) -> Tensor:
        rank = likelihood.argsort().argsort()
        return rollouts * (1.0 - self.config.rank_penalty * rank / len(rollouts))


def _mean(rewards: Tensor, rollouts: Tensor, tau: float) -> Tensor:
    return rewards - rollouts.mean()


def _leave_one_out(rewards: Tensor, rollouts: Tensor, tau: float) -> Tensor:
    return (rewards - rollouts.mean()) * (len(rollouts) / max(1, len(rollouts) - 1))


def _log_mean_exp(rewards: Tensor, rollouts: Tensor, tau: float) -> Tensor:
    return rewards - tau * ((rollouts / tau).logsumexp(0) - math.log(len(rollouts)))


def _none(rewards: Tensor, rollouts: Tensor, tau: float) -> Tensor:
    return rewards


_BASELINES: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "mean": _mean,
    "leave-one-out": _leave_one_out,
    "log-mean-exp": _log_mean_exp,
    "none": _none,
}


def _std(values: Tensor) -> Tensor:
    """Compute the standard deviation with n - 1: 1 for fewer than two values, which have none, and exactly 0 for values that differ by rounding only."""
    if len(values) < 2:
        return values.new_ones(())
    is_equal = values.max() - values.min() <= _ROUNDING * values.abs().max()
    return values.new_zeros(()) if is_equal else values.std(correction=1)


def _concatenated(parts: list[Tensor]) -> Tensor:
    import torch

    return torch.cat(parts)
