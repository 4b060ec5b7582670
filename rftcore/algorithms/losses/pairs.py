"""Sums and metrics of the preference pairs in a view of tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rftcore.algorithms.base import TokenView

if TYPE_CHECKING:
    from torch import Tensor


def pooled_pairs(view: TokenView, values_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the values and the number of tokens of the chosen and the rejected response of each pair: two tensors [P, 2].

    Both are 0 for a response without tokens; the plan of a step gives its pair the weight 0. The pairs are in the batch's order.
    """
    sequences = view.sequences
    sums_S = sequences.sum_per_sequence(values_N)
    return sequences.in_pairs(sums_S), sequences.in_pairs(sequences.num_tokens_S)


def pair_metrics(rewards_P2: Tensor) -> dict[str, Tensor]:
    """Return `chosen_reward`, `rejected_reward`, `pair_margin` (their difference) and `pair_accuracy` (share with a margin above 0).

    Args:
        rewards_P2: the rewards that the policy implies, nats.
    """
    chosen_P, rejected_P = rewards_P2.detach().unbind(dim=1)
    margin_P = chosen_P - rejected_P
    return {
        "chosen_reward": chosen_P,
        "rejected_reward": rejected_P,
        "pair_margin": margin_P,
        "pair_accuracy": (margin_P > 0).float(),
    }
