"""Processes of other starters, which end by themselves."""

from __future__ import annotations

import time
from collections.abc import Iterable

from rftdata.workers import process_lives


def wait_until_ended(pids: Iterable[int], limit_s: float = 60.0) -> None:
    """Wait for processes that end with another one, as ranks do with their trainer: just after it."""
    deadline = time.monotonic() + limit_s
    while lives := [pid for pid in pids if process_lives(pid)]:
        assert time.monotonic() < deadline, f"after {limit_s:g} s these processes still run: {lives}"
        time.sleep(0.02)
