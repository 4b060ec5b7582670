"""Where runs take place: each has a GPU and a share of the cores to itself."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.harness.rft import environment


@dataclass(frozen=True)
class Place:
    """One GPU, or the CPU where there is none.

    Attributes:
        gpu: its number, as in CUDA_VISIBLE_DEVICES.
        cores: numbers of its cores; empty for all.
    """

    gpu: str
    cores: tuple[int, ...] = ()

    @property
    def prefix(self) -> list[str]:
        """The beginning of a command that stays on the cores."""
        return ["taskset", "-c", ",".join(map(str, self.cores))] if self.cores else []

    def environment(self, **changes: str) -> dict[str, str]:
        """Return the environment of a run."""
        return environment(CUDA_VISIBLE_DEVICES=self.gpu, **changes)


def places(gpus: Sequence[str]) -> list[Place]:
    """Return a place for each GPU; several divide the cores of this machine equally."""
    if len(gpus) == 1 or shutil.which("taskset") is None:
        return [Place(gpu) for gpu in gpus]
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // len(gpus))
    return [Place(gpu, tuple(cores[number * share : (number + 1) * share])) for number, gpu in enumerate(gpus)]
