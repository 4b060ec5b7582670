"""Packages that a process has imported before it gets the environment that they read on import."""

from __future__ import annotations

import os
import sys


def apply_environment() -> None:
    """Apply the environment to imported packages, which read it only on import."""
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # forks would draw the same numbers
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if not threads.isdecimal() or not int(threads):
        return
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(int(threads))
    if (pyarrow := sys.modules.get("pyarrow")) is not None:
        pyarrow.set_cpu_count(int(threads))
