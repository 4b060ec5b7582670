"""The number of threads per process, and OpenMP's behaviour while it waits.

On a small machine, explorer and trainer alternate: while one works the other sleeps (passive waiting), so each may use all
cores. If there are more cores, they are divided. `OMP_NUM_THREADS`, which batch systems set, decides for both.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

_CORES_TO_SHARE = 8


@dataclass(frozen=True)
class Threads:
    """Threads per process, and the reason."""

    cores: int
    explorer: int
    trainer: int
    reason: str

    @property
    def sentence(self) -> str:
        return f"{self.cores} cores: explorer {self.explorer} threads, trainer {self.trainer} threads ({self.reason})"


def divide_threads(cores: int | None = None) -> Threads:
    """Return the number of threads for the processes of one machine."""
    cores = cores or len(os.sched_getaffinity(0))
    configured = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]  # further numbers are for nested loops
    if configured.isdecimal() and int(configured):
        return Threads(cores, int(configured), int(configured), "OMP_NUM_THREADS")
    if cores < _CORES_TO_SHARE:
        return Threads(cores, cores, cores, "they alternate; the waiting one sleeps")
    half = cores // 2
    return Threads(cores, half, cores - half, "they work at the same time")


def thread_environment(num_threads: int) -> dict[str, str]:
    """Return the variables that a process needs before torch is imported."""
    return {
        "OMP_NUM_THREADS": str(num_threads),
        "MKL_NUM_THREADS": str(num_threads),
        # A waiting thread must not spin: on few cores that would take the other process's time.
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }
