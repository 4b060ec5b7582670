"""Entries of experiences besides tokens and log-probabilities: their meaning, what writes them, and errors if they are missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rftcore.algorithms.base import PER_TURN, Column, StepBatch
from rftdata.errors import RftError

if TYPE_CHECKING:
    from torch import Tensor

RECORDED_BY: dict[Column, tuple[str, str]] = {
    "step_rewards": (
        "the reward of a turn alone",
        "record it for each turn in the workflow: turn.record(step_reward=…)",
    ),
    "state": (
        "a hash of the environment's state before a turn",
        "record it for each turn in the workflow: turn.record(state=…)",
    ),
    "baseline_rewards": (
        "the reward of a greedy rollout of the task",
        "let the explorer sample the groups with explorer.greedy_baseline: true, which is the default of algorithms that need it",
    ),
    "role_baselines": (
        "the running mean reward of its taskset and role",
        "derive the advantage from rftcore.algorithms.advantages.rae:RAE, for which the trainer keeps them in rft.role_baseline",
    ),
    "reward_parts": (
        "the same named rewards that its others have",
        "name several functions in explorer.reward, or let one return a mapping with the same names each time",
    ),
}
"""The meaning of each column, and what writes it."""


def refuse_missing_rewards(batch: StepBatch, needed_B: Tensor) -> None:
    """Refuse rewards that are not finite, before a NaN reaches the weights.

    Args:
        needed_B: bool; False for sequences whose reward is not read.

    Raises:
        RftError: names the first reward that is not finite.
    """
    wrong = (needed_B & ~batch.rewards_B.isfinite()).nonzero().flatten().tolist()
    if wrong:
        row = wrong[0]
        raise RftError(
            f"{len(wrong)} of {batch.num_sequences} rewards of the batch cannot be trained on; the first is row {row}, "
            f"rollout {int(batch.rollout_B[row])} of group {int(batch.group_B[row])} of the batch",
            value=float(batch.rewards_B[row]),
            allowed="finite numbers",
            todo="set the reward (UPDATE rft.experience SET reward = …) or drop the row in the operator chain",
        )


def refuse_missing_columns(batch: StepBatch, columns: frozenset[Column]) -> None:
    """Refuse a batch without the entries that the parts read.

    Raises:
        RftError: names the first missing entry.
    """
    for column in sorted(columns):
        if getattr(batch, f"{column}_BA" if column in PER_TURN else f"{column}_B") is None:
            what, how = RECORDED_BY[column]
            raise RftError(
                f"the batch has no {column.replace('_', ' ')} ({what}), which the algorithm's parts read", todo=how
            )
