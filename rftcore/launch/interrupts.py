"""Signals that ask `rft run` to stop: Ctrl-C, SIGTERM, and SIGHUP of a terminal that is closed.

The first one stops the run in good order. A second one, after at least `SAME_S` seconds, ends the roles at once; both leave a run that
`--resume` goes on with, and exit with 128 + the number of the first signal. A third one ends the process as any KeyboardInterrupt.
`timeout` and terminals signal a process and then its whole group: what comes within `SAME_S` seconds is the same request.

Before the run is stored there is nothing to stop in order, so the first signal raises `StartInterrupted`; `defer` ends that, and is
called just before a run is stored.
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


class Interrupts:
    """Receives the signals while it is entered; in the main thread only.

    Attributes:
        first: the first signal; None while none has arrived.
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
        """Whether the run shall stop."""
        return self.first is not None

    @property
    def exit_code(self) -> int:
        """Of a process that a signal stopped, as shells have it: 130 for SIGINT, 143 for SIGTERM, 129 for SIGHUP."""
        assert self.first is not None
        return 128 + self.first

    @property
    def reason(self) -> str:
        """How the run was stopped, for its outcome."""
        assert self.first is not None
        return "stopped by a person" if self.first is signal.SIGINT else f"stopped by {self.first.name}"

    def defer(self) -> None:
        """From now on a first signal is noted only: the caller looks at `stop`."""
        self._deferred = True

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the handlers while Ray is started, which sets one of its own for SIGTERM; it exits, and that counts as the signal.

        What is done within may therefore end half-way: the caller looks at `stop`.
        """
        try:
            yield
        except SystemExit:
            self._install()
            self._note(signal.SIGTERM)
        finally:
            self._install()

    def __enter__(self) -> Interrupts:
        # `nohup` and shells that start a command in the background let it ignore a signal: it stays ignored.
        main = threading.current_thread() is threading.main_thread()
        self._before = {s: before for s in _SIGNALS if main and (before := signal.getsignal(s)) is not signal.SIG_IGN}
        self._install()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            # None: it was set from C, and Python cannot set it again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _install(self) -> None:
        for number in self._before:
            signal.signal(number, self._handle)

    def _handle(self, number: int, _: FrameType | None) -> None:
        self._note(signal.Signals(number))

    def _note(self, number: signal.Signals) -> None:
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
