"""Changes of a buffer as hints, for pages that show its current state."""

from __future__ import annotations

from types import TracebackType

from rftdata.buffer import Buffer
from rftdata.postgres.notify import PLANNED, POLICY, READY, RUN, SEALED, Listener

# What a change concerns -> the topic that announces it.
TOPICS = {"planned": PLANNED, "sealed": SEALED, "ready": READY, "policy": POLICY, "run": RUN}


class Changes:
    """Waits for changes; for use by one thread. A change may be announced late, twice or never, so readers also look from time to time."""

    def __init__(self, buffer: Buffer) -> None:
        self._listener = Listener(buffer.database, *TOPICS.values())

    def wait(self, timeout_s: float) -> bool:
        """Wait for a change; return False after `timeout_s`."""
        return self._listener.wait(timeout_s)

    def __enter__(self) -> Changes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        self._listener.close()
