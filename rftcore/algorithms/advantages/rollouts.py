"""Functions that advantages share: the groups and rollouts of a batch, the order of tokens in time, rewards to go, and scaling.

All functions see the whole optimizer batch. A rollout's turns may be one sequence with several stretches of tokens that count, or
several sequences. The order in time is rollout after rollout, turn after turn, and holds only tokens with a loss, so that what the
environment wrote between two turns takes no part in a recursion.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    """Return the mean over each rollout's sequences, one entry per rollout."""
    _, place = rollout.unique(return_inverse=True)
    means: Tensor = place.bincount(weights=values) / place.bincount()
    return means


def total_rewards(batch: StepBatch) -> Tensor:
    """Return the reward of each sequence with the rewards of its tokens, [B]."""
    if batch.token_rewards_N is None:
        return batch.rewards_B
    return batch.rewards_B + batch.sum_per_sequence(batch.token_rewards_N)


@dataclass(frozen=True)
class TurnsInTime:
    """All turns of a batch in the order in time; K entries each.

    Attributes:
        sequence_K, column_K: where the turn is in `StepBatch.turn_BA`.
        rollout_K: its rollout as `rollouts` numbers it, ascending.
        last_K: whether it is its rollout's last.
    """

    sequence_K: Tensor
    column_K: Tensor
    rollout_K: Tensor
    last_K: Tensor


def turns_in_time(batch: StepBatch) -> TurnsInTime:
    """Return all turns, rollout after rollout and turn after turn."""
    sequence_K, column_K = (batch.turn_BA >= 0).nonzero(as_tuple=True)
    rollout_K = rollouts(batch)[sequence_K]
    order_K = batch.turn_BA[sequence_K, column_K].argsort(stable=True)
    order_K = order_K[rollout_K[order_K].argsort(stable=True)]
    rollout_K = rollout_K[order_K]
    return TurnsInTime(sequence_K[order_K], column_K[order_K], rollout_K, _is_last(rollout_K))


def rollouts(batch: StepBatch) -> Tensor:
    """Number the rollouts of all groups: int64 [B], 0..R-1, in the order of groups and of the rollouts in each."""
    import torch

    number_B: Tensor = torch.stack([batch.group_B, batch.rollout_B], dim=1).unique(dim=0, return_inverse=True)[1]
    return number_B


def last_sequences(batch: StepBatch) -> Tensor:
    """Return the sequence with the last turn of each rollout, int64 [R]."""
    turns = turns_in_time(batch)
    return turns.sequence_K[turns.last_K]


def outcomes(batch: StepBatch) -> Tensor:
    """Return the reward of each sequence's rollout, which is that of the sequence with its last turn, float64 [B]."""
    return batch.rewards_B.double()[last_sequences(batch)][rollouts(batch)]


def rollout_sums(batch: StepBatch, values_B: Tensor) -> Tensor:
    """Add up the values of all sequences of each sequence's rollout, float64 [B]."""
    rollout_B = rollouts(batch)
    return sums(values_B.double(), rollout_B)[rollout_B]


def turn_sums(batch: StepBatch, values_N: Tensor) -> Tensor:
    """Add up the values of each turn's tokens, [B, A]; 0 for a turn without tokens."""
    num_turns = batch.turn_BA.shape[1]
    flat = values_N.new_zeros(batch.turn_BA.numel())
    return flat.index_add(0, batch.sequence_N * num_turns + batch.turn_N, values_N).view(-1, num_turns)


def turn_rewards(batch: StepBatch, turns: TurnsInTime, *, with_outcome: bool = False) -> Tensor:
    """Return the reward of each turn with those of its tokens, float64 [K].

    Args:
        with_outcome: add the rollout's reward to that of its last turn. Where workflows recorded no rewards of turns, it is always added.
    """
    place_K = (turns.sequence_K, turns.column_K)
    rewards_K = batch.rewards_B.new_zeros(len(turns.sequence_K)).double()
    if batch.step_rewards_BA is not None:
        rewards_K = batch.step_rewards_BA[place_K].double()
    if batch.step_rewards_BA is None or with_outcome:
        rewards_K = rewards_K + batch.rewards_B.double()[turns.sequence_K].where(turns.last_K, 0.0)
    if batch.token_rewards_N is not None:
        rewards_K = rewards_K + turn_sums(batch, batch.token_rewards_N.double())[place_K]
    return rewards_K


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
    rollout_N = rollouts(batch)[batch.sequence_N]
    place_N = batch.turn_BA[batch.sequence_N, batch.turn_N].argsort(stable=True)
    place_N = place_N[rollout_N[place_N].argsort(stable=True)]
    return place_N, _is_last(rollout_N[place_N])


def of_turns(batch: StepBatch, turns: TurnsInTime, values_K: Tensor) -> Tensor:
    """Give each token the value of its turn, float32 [N]."""
    values_BA = values_K.new_zeros(batch.turn_BA.shape)
    values_BA[turns.sequence_K, turns.column_K] = values_K
    return values_BA[batch.sequence_N, batch.turn_N].float()


def _is_last(key: Tensor) -> Tensor:
    """Return whether each entry is the last with its key, of entries whose equal keys are adjacent; bool."""
    last = key.new_ones(len(key)).bool()
    last[:-1] = key[1:] != key[:-1]
    return last


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
