"""Prefer the shorter of a group's right answers: the length reward of Kimi k1.5 (arXiv 2501.12599, section 2.3.3).

    - exact_match
    - {name: shortest_correct, weight: 0.2}
    - {name: shortest_correct, part: math_verify, at_least: 1, weight: 0.2}

With the lengths L of the group's rollouts, in tokens of their answers over all turns:

    λ_i = 0.5 − (L_i − min L) / (max L − min L)
    reward = λ_i for a right answer, min(0, λ_i) for a wrong one; 0 for all if all lengths are equal

So the shortest right answer gets 0.5, the longest −0.5, and a short wrong answer nothing. A rollout is right if its reward, or the part named by `part`, is
`at_least` or more. Let the model learn to be right first: a length reward from the first step on may make it short and wrong.
"""

from __future__ import annotations

from rftcore.rewards.answered_rollout import AnsweredRollout
from rftcore.workflows.task import Task
from rftdata.errors import RftError


def shortest_correct(
    rollouts: list[AnsweredRollout], task: Task, *, part: str | None = None, at_least: float = 1.0
) -> list[float]:
    """Return the reward of each rollout.

    Args:
        part: name of the part of the reward that tells right answers; the whole reward by default.
        at_least: smallest value of a right answer.

    Raises:
        RftError: a rollout has no such part.
    """
    lengths = [sum(len(turn.response_token_ids) for turn in rollout.turns) for rollout in rollouts]
    shortest, spread = min(lengths), max(lengths) - min(lengths)
    if not spread:
        return [0.0] * len(rollouts)
    values = [0.5 - (length - shortest) / spread for length in lengths]
    return [
        value if _score(rollout, part) >= at_least else min(0.0, value)
        for rollout, value in zip(rollouts, values, strict=True)
    ]


def _score(rollout: AnsweredRollout, part: str | None) -> float:
    if part is None:
        return rollout.reward
    if part not in rollout.parts:
        raise RftError(
            "shortest_correct names a part that the reward does not have",
            value=part,
            allowed=", ".join(rollout.parts) or "none",
            todo="correct part, or remove it for the whole reward",
        )
    return rollout.parts[part]


shortest_correct.of_group = True  # type: ignore[attr-defined]  # functions declare no attributes
shortest_correct.runs_in_explorer = True  # type: ignore[attr-defined]  # it returns at once
