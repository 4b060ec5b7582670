"""Where runs take place: each has a GPU, a share of the cores, and caches of compiled code to itself."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.rft import environment

_CACHES = {"VLLM_CACHE_ROOT": "vllm", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


@dataclass(frozen=True)
class Place:
    """One GPU, or the CPU where there is none.

    Attributes:
        gpu: its number, as in CUDA_VISIBLE_DEVICES.
        cores: numbers of its cores; empty for all.
        caches: folder of compiled code; None for the user's own.
    """

    gpu: str
    cores: tuple[int, ...] = ()
    caches: Path | None = None

    @property
    def prefix(self) -> list[str]:
        """The beginning of a command that stays on the cores."""
        return ["taskset", "-c", ",".join(map(str, self.cores))] if self.cores else []

    def environment(self, **changes: str) -> dict[str, str]:
        """Return the environment of a run."""
        caches = {} if self.caches is None else {key: str(self.caches / name) for key, name in _CACHES.items()}
        return environment(CUDA_VISIBLE_DEVICES=self.gpu, **caches, **changes)


def places(gpus: Sequence[str], folder: Path) -> list[Place]:
    """Return a place for each GPU. Several divide the cores of this machine equally, and do not write into one cache at a time.

    Args:
        folder: parent of their caches.
    """
    if len(gpus) == 1 or shutil.which("taskset") is None:
        return [Place(gpu) for gpu in gpus]
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // len(gpus))
    return [
        Place(gpu, tuple(cores[number * share : (number + 1) * share]), folder / f"caches-{gpu}")
        for number, gpu in enumerate(gpus)
    ]
