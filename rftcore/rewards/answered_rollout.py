"""`AnsweredRollout`: a rollout of a group, as rewards of whole groups see it."""

from __future__ import annotations

from dataclasses import dataclass, field

from rftcore.workflows.turn import Turn


@dataclass(frozen=True)
class AnsweredRollout:
    """A rollout that was scored alone.

    Attributes:
        rollout_index: its number in the group.
        turns: every answer that it recorded, in the order in which they were given, of all branches of its chats; at least one.
        reward: its reward so far: what the workflow returned, without rewards of whole groups.
        parts: the parts of that reward.
    """

    rollout_index: int
    turns: list[Turn]
    reward: float
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def turn(self) -> Turn:
        """The last answer."""
        return self.turns[-1]

    @property
    def response(self) -> str:
        """The text of the last answer."""
        return self.turn.response
