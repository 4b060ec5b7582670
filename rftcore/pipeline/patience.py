"""What a pipeline worker does when a stage fails on everything: it waits, and loses nothing."""

from __future__ import annotations

import time
from collections.abc import Callable

from operators.stage import StageError
from rftdata.claims import SealedBatch

_PATIENCE_S = 600.0
_PATIENCE_ALONE_S = 30.0
_LONGEST_WAIT_S = 60.0


class Patience:
    """How long to wait for a stage that fails on everything: a little longer each time, and not for ever.

    A group that is alone in its batch is waited for less long, since nobody can know whether others would pass.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: float | None = None
        self._tries = 0

    def has_more(self, batch: SealedBatch) -> bool:
        """Whether a batch of which nothing passes is to be tried again, rather than set aside."""
        alone = len(batch.group_ids) == 1
        return not alone or self._since is None or self._clock() - self._since < _PATIENCE_ALONE_S

    def passed(self) -> None:
        self._since, self._tries = None, 0

    def failed(self, error: StageError) -> float:
        """Seconds until the next try.

        Raises:
            StageError: it has failed for too long.
        """
        now = self._clock()
        self._since = now if self._since is None else self._since
        self._tries += 1
        if now - self._since > _PATIENCE_S:
            raise error
        return float(min(2 ** (self._tries - 1), _LONGEST_WAIT_S))
