"""Limits of a rollout that end it and keep it: of its turns, its tokens, the model's context and its time."""

from __future__ import annotations

from dataclasses import dataclass

from rftdata.errors import RftError


@dataclass(frozen=True)
class Limits:
    """Limits of one rollout, each with the setting of the same name.

    Attributes:
        max_turns: number of answers.
        max_rollout_tokens: number of sampled tokens of all answers; the last answer is cut there.
    """

    max_turns: int | None = None
    max_rollout_tokens: int | None = None


NO_LIMITS = Limits()


class LimitReachedError(RftError):
    """The model answers no further in this rollout, and what it has answered is kept.

    A workflow may catch it to score what there is. If it does not, the reward functions score the last turn.

    Attributes:
        reason: one of `rftdata.experience.STOP_REASONS`.
    """

    def __init__(self, reason: str, what: str) -> None:
        super().__init__(what)
        self.reason = reason
