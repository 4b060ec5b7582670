"""Rescale rewards, within each group or over the batch.

    - normalize_reward: {}
    - normalize_reward: {method: rank, by: group}
    - normalize_reward: {method: min_max, by: batch}

Over the R rollouts of a group (or batch) with finite rewards r_i:

    z_score:  (r_i − mean(r)) / (std(r) + eps), std with R − 1 in the denominator; 0 where all are equal
              (GRPO's advantage, arXiv 2402.03300, section 4.1.2)
    min_max:  (r_i − min(r)) / (max(r) − min(r)); 0.5 where all are equal
    rank:     (rank_i − 1) / (R − 1), equal rewards share the mean of their ranks; 0.5 for a single one

GRPO normalises by itself. This stage is for algorithms that use rewards as they are, and for judges whose scales differ by task. Over the
batch the result depends on which groups are decided together.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import pyarrow as pa
from pydantic import Field

from operators.base import Operator, StageConfig, StageOutcome
from operators.groups import Floats, Groups, Ints, extremes, finite


class NormalizeReward(Operator, revision=1):
    """Replaces each finite reward by its normalised value; null, NaN and infinite rewards stay and are not counted.

    A rollout of several rows counts once, with their mean; all its rows get the same value.
    """

    class Config(StageConfig):
        """Which formula, and over which rollouts."""

        method: Literal["z_score", "min_max", "rank"] = Field("z_score", description="The formula, see above.")
        by: Literal["group", "batch"] = Field("group", description="Over which rollouts.")
        eps: float = Field(1e-6, ge=0, description="Added to the standard deviation.")

    reads = frozenset({"group_id", "rollout_index", "role", "reward"})
    writes = frozenset({"reward"})

    def apply(self, table: pa.Table) -> StageOutcome:
        groups = Groups.by_role(table)
        reward_N = finite(table["reward"].combine_chunks())
        reward_R = groups.rollout_means(reward_N)
        has_reward_R = ~np.isnan(reward_R)
        set_R = (groups.group_R if self.config.by == "group" else np.zeros_like(groups.group_R))[has_reward_R]
        num_sets = int(set_R.max(initial=-1)) + 1
        values_R = np.full(len(reward_R), np.nan)
        values_R[has_reward_R] = getattr(self, f"_{self.config.method}")(reward_R[has_reward_R], set_R, num_sets)
        values = pa.array(values_R[groups.rollout_N], mask=np.isnan(reward_N))
        rewards = table["reward"].combine_chunks()
        return StageOutcome.keep_all(table.num_rows, {"reward": pa.compute.coalesce(values, rewards)})

    def _z_score(self, rewards: Floats, sets: Ints, num_sets: int) -> Floats:
        counts = np.bincount(sets, minlength=num_sets)
        centred = rewards - (np.bincount(sets, weights=rewards, minlength=num_sets) / np.maximum(counts, 1))[sets]
        squares = np.bincount(sets, weights=centred**2, minlength=num_sets)
        deviation = np.sqrt(squares / np.maximum(counts - 1, 1))
        # The mean of equal rewards has a rounding error, which divided by eps would give scores of random sign.
        lowest, highest = extremes(rewards, sets, num_sets)
        denominator = (deviation + self.config.eps)[sets]
        return np.where((highest > lowest)[sets], centred / np.where(denominator > 0, denominator, 1.0), 0.0)

    def _min_max(self, rewards: Floats, sets: Ints, num_sets: int) -> Floats:
        lowest, highest = extremes(rewards, sets, num_sets)
        spread = (highest - lowest)[sets]
        return np.where(spread > 0, (rewards - lowest[sets]) / np.where(spread > 0, spread, 1.0), 0.5)

    def _rank(self, rewards: Floats, sets: Ints, num_sets: int) -> Floats:
        order = np.lexsort((rewards, sets))
        ordered, of = rewards[order], sets[order]
        starts = np.flatnonzero(np.r_[True, (ordered[1:] != ordered[:-1]) | (of[1:] != of[:-1])])
        lengths = np.diff(np.r_[starts, len(ordered)])
        first_of_set = np.searchsorted(of, np.arange(num_sets))
        ranks = np.empty(len(rewards))
        # Ranks from 0; equal rewards share the mean of theirs.
        ranks[order] = np.repeat(starts + (lengths - 1) / 2, lengths) - first_of_set[of]
        counts = np.bincount(sets, minlength=num_sets)[sets]
        return np.where(counts > 1, ranks / np.maximum(counts - 1, 1), 0.5)
