"""Signals that ask `rft run` to stop: Ctrl-C, SIGTERM, and SIGHUP from a closed terminal.

The first signal stops the run in good order. A second one, at least `SAME_S` seconds later, kills the roles. Both leave a run that
`--resume` continues, and exit with 128 + the number of the first signal. A third one ends the process like any KeyboardInterrupt.
`timeout` and terminals signal a process and then its whole group, so signals within `SAME_S` seconds are one request.

Before the run is stored there is nothing to stop, so the first signal raises `StartInterrupted`. `defer`, called just before a run is
stored, ends that.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SAME_S = 1.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_Handler = Callable[[int, FrameType | None], Any] | int | None


class StartInterrupted(KeyboardInterrupt):
    """A signal arrived before the run was stored."""


class StopSignals:
    """Receives the signals inside its `with` block; in the main thread only.

    Attributes:
        first: the first signal; None if there was none.
        urgent: whether a second one has arrived.
    """

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.urgent = False
        self._at = 0.0
        self._deferred = False
        self._before: dict[signal.Signals, _Handler] = {}

    @property
    def stop(self) -> bool:
        """Whether the run should stop."""
        return self.first is not None

    @property
    def exit_code(self) -> int:
        """Exit code after a signal, as in shells: 130 for SIGINT, 143 for SIGTERM, 129 for SIGHUP."""
        assert self.first is not None
        return 128 + self.first

    @property
    def reason(self) -> str:
        """Reason of the stop, for the run's outcome."""
        assert self.first is not None
        return "stopped by a person" if self.first is signal.SIGINT else f"stopped by {self.first.name}"

    def defer(self) -> None:
        """Only record a first signal from now on; the caller checks `stop`."""
        self._deferred = True

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the handlers in a block that starts Ray, which installs a SIGTERM handler that exits.

        Its exit counts as the signal. The block may therefore end early, so the caller checks `stop`.
        """
        try:
            yield
        except SystemExit:
            self._install()
            self._record(signal.SIGTERM)
        finally:
            self._install()

    def __enter__(self) -> StopSignals:
        # A signal ignored by `nohup` or by a shell that starts background commands stays ignored.
        main = threading.current_thread() is threading.main_thread()
        self._before = {s: before for s in _SIGNALS if main and (before := signal.getsignal(s)) is not signal.SIG_IGN}
        self._install()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            # None: the handler was installed from C, and Python cannot restore it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _install(self) -> None:
        for number in self._before:
            signal.signal(number, self._handle)

    def _handle(self, number: int, _: FrameType | None) -> None:
        self._record(signal.Signals(number))

    def _record(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if self.first is None:
            self.first, self._at = number, now
            if not self._deferred:
                raise StartInterrupted
        elif now - self._at < SAME_S:
            return
        elif not self.urgent:
            self.urgent, self._at = True, now
        else:
            raise KeyboardInterrupt
