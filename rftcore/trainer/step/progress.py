"""`StepProgress`: how long a trainer's step has been without progress, to distinguish a step that hangs from one that is long.

A step makes progress with every micro-batch. On a GPU the host launches micro-batches long before they are computed, so each is marked by an
event in the device's stream. The watching thread (`rftcore.trainer.trainer_watch`) looks which events have passed; the training thread waits for none.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class StepProgress:
    """The progress of one rank. The training thread marks it, and any thread may read it.

    Args:
        device: the device of the rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._since: float | None = None
        self._events: deque[torch.cuda.Event] = deque()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Count the time of this block."""
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._since = None
            self._events.clear()

    def mark(self) -> None:
        """Record progress; on a GPU, once everything launched until now is computed."""
        if self._since is None:
            return
        if self._on_gpu:
            event = torch.cuda.Event()
            event.record()
            self._events.append(event)
        else:
            self._since = time.monotonic()

    def stuck_s(self) -> float:
        """Return the seconds since the last progress; 0 outside a step."""
        while self._events and self._events[0].query():
            self._events.popleft()
            self._since = time.monotonic() if self._since is not None else None
        since = self._since
        return 0.0 if since is None else time.monotonic() - since
