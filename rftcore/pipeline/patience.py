"""Waiting of a pipeline worker for a stage that fails on everything, without losing rows."""

from __future__ import annotations

import time
from collections.abc import Callable

from operators.chain.stage import StageError
from rftdata.pipeline.records import SealedBatch

_PATIENCE_ALONE_S = 30.0
_LONGEST_WAIT_S = 60.0


class Patience:
    """Determines how long to wait for a stage that fails on everything: longer each time, up to a limit.

    A group that is alone in its batch, and has no row that passes, is set aside after a while if other groups passed before it. If
    none ever did, the stage is considered broken.

    Args:
        limit_s: seconds for which a stage may fail on everything.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._since: float | None = None
        self._tries = 0
        self._ever_passed = False

    def has_more(self, batch: SealedBatch) -> bool:
        """Return whether a batch without a row that passes is tried again instead of being set aside."""
        if len(batch.group_ids) > 1 or not self._ever_passed or self._since is None:
            return True
        return self._clock() - self._since < min(_PATIENCE_ALONE_S, self._limit_s)

    def passed(self) -> None:
        """Record that a batch was decided on."""
        self._since, self._tries, self._ever_passed = None, 0, True

    def failed(self, error: StageError) -> float:
        """Return the seconds until the next try.

        Raises:
            StageError: the stage has failed for too long.
        """
        now = self._clock()
        self._since = now if self._since is None else self._since
        self._tries += 1
        if now - self._since >= self._limit_s:
            raise error
        return float(min(2 ** (self._tries - 1), _LONGEST_WAIT_S))
