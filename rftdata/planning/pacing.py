"""Pacing: how far explorers may be ahead of the trainer (design: "Freshness and synchronization as one rule").

Explorer step s feeds trainer step s + 1. It may start once the policy stands at trainer step p with

- p >= floor((s - offset) / interval) * interval: the schedule, and
- p >= s - window: the groups of the step are then no older than `sampling.max_staleness` when they are trained on. An offset without
  bound is fully asynchronous, and samples nothing that would be too old.

Planning (`planning_state`) computes the same in the database.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Pacing:
    """The rule of one run.

    Attributes:
        interval: explorer steps that share a policy.
        offset: explorer steps that may run ahead.
        window: the most trainer steps between the policy of a group and the step for which it is planned.
    """

    interval: int
    offset: int
    window: int

    def last_step(self, policy_step: int) -> int:
        """Return the highest explorer step that may start while the policy is at `policy_step`."""
        return min((policy_step // self.interval + 1) * self.interval - 1 + self.offset, policy_step + self.window)

    def needed_policy(self, explore_step: int) -> int:
        """Return the trainer step of the first policy with which an explorer step may start."""
        scheduled = (explore_step - self.offset) // self.interval * self.interval
        return max(0, scheduled, explore_step - self.window)
