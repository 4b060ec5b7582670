"""A child process that ends when its parent does."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Let the system kill this process, or signal it, when its parent ends, however that happens.

    The system sends the signal when the thread ends that started this process, so that thread must live as long as the parent.

    Args:
        parent: the parent's process id. If it has already ended, this process exits at once.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # the parent ended before that call
        os._exit(1)


def outlive_parent() -> None:
    """Undo `end_with_parent`."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)
