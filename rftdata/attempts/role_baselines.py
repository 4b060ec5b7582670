"""`RoleBaseline`: the running mean reward of one role in one taskset, as a step of an attempt leaves it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RoleBaseline:
    """A row of `rft.role_baseline`, without its step.

    Attributes:
        role: as in `rft.experience`; empty for experiences without one.
        num_rollouts: number of rollouts that have advanced it.
    """

    taskset: str
    role: str
    baseline: float = 0.0
    num_rollouts: int = 0

    def advanced(self, reward: float, decay: float) -> RoleBaseline:
        """Return the baseline after a rollout: decay · b + (1 - decay) · reward."""
        return RoleBaseline(
            taskset=self.taskset,
            role=self.role,
            baseline=decay * self.baseline + (1.0 - decay) * reward,
            num_rollouts=self.num_rollouts + 1,
        )
