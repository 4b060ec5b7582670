"""Limits of how often something may be done."""

from __future__ import annotations

import threading
import time
from collections import deque

_MAX_NAMES = 10_000


class RateLimit:
    """Allows `count` uses in `seconds` for each name; safe for threads."""

    def __init__(self, count: int, seconds: float) -> None:
        self._count, self._seconds = count, seconds
        self._lock = threading.Lock()
        self._uses: dict[str, deque[float]] = {}

    def wait_s(self, name: str) -> float:
        """Record a use and return 0, or return the seconds until the next use is allowed."""
        now = time.monotonic()
        with self._lock:
            if len(self._uses) >= _MAX_NAMES:
                self._uses = {key: uses for key, uses in self._uses.items() if uses and uses[-1] > now - self._seconds}
            uses = self._uses.setdefault(name, deque())
            while uses and uses[0] <= now - self._seconds:
                uses.popleft()
            if len(uses) >= self._count:
                return uses[0] + self._seconds - now
            uses.append(now)
            return 0.0

    def take_back(self, name: str) -> None:
        """Forget the newest use of a name."""
        with self._lock:
            if uses := self._uses.get(name):
                uses.pop()

    def forget(self, name: str) -> None:
        """Forget the uses of a name."""
        with self._lock:
            self._uses.pop(name, None)
