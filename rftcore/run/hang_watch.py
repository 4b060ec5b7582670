"""`HangWatch`: a thread that checks how long some work has been without progress, and acts beyond a limit.

The work may be inside native code, where no exception reaches it, so the action usually ends the process. The steps of the trainer
(`rftcore.trainer.trainer_watch`) and engines (`rftcore.explorer.engine_watch`) are watched.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

_LONGEST_LOOK_S = 1.0


class HangWatch:
    """Watches until it is closed or has acted once.

    Args:
        stuck_s: returns the seconds since the last progress, 0 without work; called in the watching thread.
        limit_s: seconds without progress after which the work counts as hanging.
        act: called once when it hangs.
    """

    def __init__(self, stuck_s: Callable[[], float], limit_s: float, act: Callable[[], None]) -> None:
        self._stuck_s, self._limit_s, self._act = stuck_s, limit_s, act
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hang watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(min(_LONGEST_LOOK_S, self._limit_s / 4)):
            if self._stuck_s() > self._limit_s:
                self._act()
                return
