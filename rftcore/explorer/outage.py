"""Pauses an explorer whose rollouts all fail although others have succeeded: a judge, a sandbox or a network is gone for a while.

A mistake in a reward shows in the first step, and ends the run (`RunFailures`). Something that worked before and fails now may return, so the
explorer waits: it claims one group at a time, with growing pauses in between, so that an outage costs few groups. The first rollout that
succeeds ends the pauses. Only an outage that lasts longer than `explorer.patience_s`, and during which no other explorer has success, ends the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
# One hard task is no outage.
_MOST_GROUPS = 8


class Outage:
    """Counts groups in a row without a good rollout.

    Args:
        patience_s: seconds for which all may fail.
        groups_per_step: number of failed groups in a row that make an outage; at most `_MOST_GROUPS` are needed.
        num_succeeded: returns the number of successful rollouts of the run, over all explorers.
    """

    def __init__(
        self,
        patience_s: float,
        groups_per_step: int,
        num_succeeded: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._patience_s, self._num_succeeded, self._clock = patience_s, num_succeeded, clock
        self._enough = min(groups_per_step, _MOST_GROUPS)
        self._num_groups = 0
        self._error = ""
        self._try_at = clock()
        self._tried_at: float | None = None
        self._pause_s = self._lasted_s = 0.0
        self._succeeded_before = 0

    @property
    def lasts(self) -> bool:
        """Whether there is an outage."""
        return self._num_groups >= self._enough

    @property
    def pauses(self) -> bool:
        """Whether the next try is not due yet."""
        return self.lasts and self._clock() < self._try_at

    def passed(self) -> None:
        """Record a group with a good rollout."""
        self._num_groups, self._pause_s, self._lasted_s, self._tried_at = 0, 0.0, 0.0, None

    def claimed(self) -> None:
        """Record that a group, or an evaluation, was claimed."""
        self._tried_at = self._clock()

    def failed(self, error: str) -> float | None:
        """Record a group without a good rollout; return the seconds for which all have failed if that is too long, else None.

        Pauses and tries count, but not the time in which there is nothing to claim.
        """
        now = self._clock()
        self._num_groups += 1
        self._error = error
        if not self.lasts:
            return None
        if self._pause_s == 0.0:
            self._succeeded_before = self._num_succeeded()
        elif self._tried_at is not None:
            self._lasted_s += self._pause_s + now - self._tried_at
            self._tried_at = None
        if now >= self._try_at:  # not a group that was claimed before the pause
            self._pause_s = min(max(_FIRST_PAUSE_S, 2 * self._pause_s), _LONGEST_PAUSE_S)
            self._try_at = now + self._pause_s
        return self._too_long()

    def _too_long(self) -> float | None:
        if self._lasted_s < self._patience_s:
            return None
        if (succeeded := self._num_succeeded()) > self._succeeded_before:  # only this explorer has no success
            self._lasted_s, self._succeeded_before = 0.0, succeeded
            return None
        return self._lasted_s

    def room(self, wanted: int, num_in_flight: int) -> int:
        """Return how many of the wanted groups may be claimed now."""
        if not self.lasts:
            return wanted
        return 0 if self.pauses or num_in_flight else min(1, wanted)

    def __str__(self) -> str:
        return (
            f"what its rollouts need: all those of {self._num_groups} groups in a row failed, the last with {self._error.rstrip('.')}; tries one group "
            f"after {self._pause_s:g} s"
        )
