"""Functions that advantages share: the groups and rollouts of a batch, the order of tokens in time, rewards to go, and scaling.

All functions see the whole optimizer batch. A rollout's turns may be one sequence with several stretches of tokens that count, or
several sequences. The order in time is rollout after rollout, turn after turn, and holds only tokens with a loss, so that what the
environment wrote between two turns takes no part in a recursion.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rftcore.algorithms.base import StepBatch

if TYPE_CHECKING:
    from torch import Tensor

# Below the square root, as in TRL and verl: differences that are only rounding stay small.
_MIN_VARIANCE = 1e-8


def groups(batch: StepBatch) -> list[Tensor]:
    """Return the indices of the sequences of each group."""
    order = batch.group_B.argsort(stable=True)
    return list(order.split(batch.group_B.unique(return_counts=True)[1].tolist()))


def rollout_means(values: Tensor, rollout: Tensor) -> Tensor:
    """Return the mean of each rollout's turns, one entry per rollout."""
    _, place = rollout.unique(return_inverse=True)
    means: Tensor = place.bincount(weights=values) / place.bincount()
    return means


def total_rewards(batch: StepBatch) -> Tensor:
    """Return the reward of each sequence with the rewards of its tokens, [B]."""
    if batch.token_rewards_N is None:
        return batch.rewards_B
    return batch.rewards_B + batch.sum_per_sequence(batch.token_rewards_N)


def turns_in_time(batch: StepBatch) -> tuple[Tensor, Tensor]:
    """Return all sequences, rollout after rollout and turn after turn, and whether each is its rollout's last; [B] each."""
    order_B = batch.turn_B.argsort(stable=True)
    for key_B in (batch.rollout_B, batch.group_B):
        order_B = order_B[key_B[order_B].argsort(stable=True)]
    group_B, rollout_B = batch.group_B[order_B], batch.rollout_B[order_B]
    last_B = group_B.new_ones(len(order_B)).bool()
    last_B[:-1] = (group_B[1:] != group_B[:-1]) | (rollout_B[1:] != rollout_B[:-1])
    return order_B, last_B


def rollouts(batch: StepBatch) -> Tensor:
    """Number the rollouts of all groups: int64 [B], 0..R-1, ascending in the order in time."""
    order_B, last_B = turns_in_time(batch)
    rollout_B = order_B.new_zeros(len(order_B))
    rollout_B[order_B] = last_B.long().cumsum(0) - last_B.long()
    return rollout_B


def outcomes(batch: StepBatch) -> Tensor:
    """Return the reward of the last turn of each sequence's rollout, float64 [B]."""
    order_B, last_B = turns_in_time(batch)
    return batch.rewards_B.double()[order_B[last_B]][rollouts(batch)]


def rollout_sums(batch: StepBatch, values_B: Tensor) -> Tensor:
    """Add up the values of all turns of each sequence's rollout, float64 [B]."""
    rollout_B = rollouts(batch)
    return sums(values_B.double(), rollout_B)[rollout_B]


def rollout_rewards(batch: StepBatch) -> Tensor:
    """Return the outcome of each sequence's rollout with the rewards of all of the rollout's tokens, float64 [B]."""
    if batch.token_rewards_N is None:
        return outcomes(batch)
    return outcomes(batch) + rollout_sums(batch, batch.sum_per_sequence(batch.token_rewards_N.double()))


def sums(values: Tensor, key: Tensor) -> Tensor:
    """Add up the values with each key, [K].

    Args:
        key: int64, 0..K-1.
    """
    return values.new_zeros(len(key.bincount())).index_add(0, key, values)


def tokens_in_time(batch: StepBatch) -> tuple[Tensor, Tensor]:
    """Return the places of all tokens in the order in time, and whether each is its rollout's last; [N] each."""
    rank_B = turns_in_time(batch)[0].argsort()
    place_N = rank_B[batch.sequence_N].argsort(stable=True)
    rollout_N = rollouts(batch)[batch.sequence_N[place_N]]
    last_N = rollout_N.new_ones(len(place_N)).bool()
    last_N[:-1] = rollout_N[1:] != rollout_N[:-1]
    return place_N, last_N


def rewards_in_time(batch: StepBatch, outcomes_B: Tensor, place_N: Tensor, last_N: Tensor) -> Tensor:
    """Return each token's reward, float64 [N] in the order in time: its own, and at the last token the rollout's outcome.

    Args:
        outcomes_B: of the rollout of each sequence.
        place_N, last_N: from `tokens_in_time`.
    """
    own_N = outcomes_B.new_zeros(len(place_N)) if batch.token_rewards_N is None else batch.token_rewards_N.double()
    return own_N[place_N] + outcomes_B[batch.sequence_N[place_N]] * last_N


def accumulated(values: Tensor, last: Tensor, factor: float) -> Tensor:
    """Compute y_t = x_t + factor · y_{t+1}, and y_t = x_t where `last` is True; float64.

    Each pass doubles how many tokens a sum reaches over, so that the longest rollout of T tokens takes log2(T) passes.

    Args:
        values: in the order in time.
        last: bool; True at the last token of each rollout.
    """
    import torch

    sums = values.double()
    ends = last.nonzero().flatten()
    place = torch.arange(len(sums))
    to_come = ends[last.long().cumsum(0) - last.long()] - place  # the tokens of the rollout after each
    reach, longest = 1, int(to_come.max()) if len(sums) else 0
    while reach <= longest:
        later = sums.new_zeros(len(sums))
        later[:-reach] = sums[reach:]
        sums = sums + factor**reach * later.where(to_come >= reach, 0.0)
        reach *= 2
    return sums


def whitened(values: Tensor) -> Tensor:
    """Scale to (x - mean) / std with n - 1. All are 0 where they are equal, and where there are fewer than two."""
    if len(values) < 2 or bool(values.max() == values.min()):
        return values.new_zeros(len(values))
    scaled: Tensor = (values - values.mean()) / (values.var(correction=1) + _MIN_VARIANCE).sqrt()
    return scaled


def normalised(values: Tensor, key: Tensor, *, scale: bool, eps: float) -> Tensor:
    """Subtract the mean of the entries with the same key, and with `scale` divide by (std + eps), the std with n - 1.

    Entries that are alone with their key, or equal to all others of it, are 0.

    Args:
        key: int64, 0..K-1.
    """
    num_K = key.bincount()
    centred = values - (sums(values, key) / num_K)[key]
    low_K, high_K = (
        values.new_zeros(len(num_K)).scatter_reduce(0, key, values, how, include_self=False) for how in ("amin", "amax")
    )
    centred = centred * (high_K > low_K)[key]
    if not scale:
        return centred
    std_K = (sums(centred.square(), key) / (num_K - 1).clamp(min=1)).sqrt()
    return centred / (std_K + eps)[key]
