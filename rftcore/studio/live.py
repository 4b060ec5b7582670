"""Hints to open pages that something may have changed.

One thread of the studio waits for changes of the buffer, and each tab has one event stream. An event carries no data: the page fetches
again what it shows. Hints are at least a second apart, and without a change there is one every 15 seconds, since an announcement may be
lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator

from rftdata.buffer import Buffer
from rftdata.errors import RftError
from rftdata.reports.changes import Changes

_POLL_S = 1.0
_APART_S = 1.0
_REGULAR_S = 15.0


class LiveHints:
    """The event streams of all tabs."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self._tabs: set[asyncio.Event] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="studio-changes", daemon=True)

    def start(self) -> None:
        """Start; called in the event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """End all streams."""
        self._ended.set()
        self._wake_tabs()

    async def stream(self) -> AsyncIterator[str]:
        """Yield server-sent events for one tab until the studio or the tab ends."""
        changed = asyncio.Event()
        self._tabs.add(changed)
        try:
            yield "retry: 2000\n\n"
            while not self._ended.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), _REGULAR_S)
                changed.clear()
                yield "event: live\ndata:\n\n"
        finally:
            self._tabs.discard(changed)

    def hint(self) -> None:
        """Let all tabs look again, after a write through a page."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake_tabs)

    def _wake_tabs(self) -> None:
        for changed in self._tabs:
            changed.set()

    def _watch(self) -> None:
        with Changes(self._buffer) as changes:
            while not self._ended.is_set():
                try:
                    is_changed = changes.wait(_POLL_S)
                except RftError:
                    # Pages report that the database is gone; here the next round tries again.
                    is_changed = False
                    time.sleep(_POLL_S)
                if is_changed and not self._ended.is_set():
                    self.hint()
                    self._ended.wait(_APART_S)
