"""Where runs take place: each has a GPU and a share of the cores.

Several places share the caches of TorchInductor and Triton, whose files are complete before they get their names. vLLM writes some of its files in place, so
each place has a cache of vLLM to itself, which begins as a copy of the first one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.rft import environment

_SHARED = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


@dataclass(frozen=True)
class Place:
    """One GPU, or the CPU where there is none.

    Attributes:
        gpu: its number, as in CUDA_VISIBLE_DEVICES.
        cores: numbers of its cores; empty for all.
        caches: folder of compiled code of all places; None for the user's own caches.
    """

    gpu: str
    cores: tuple[int, ...] = ()
    caches: Path | None = None

    @property
    def prefix(self) -> list[str]:
        """The beginning of a command that stays on the cores."""
        return ["taskset", "-c", ",".join(map(str, self.cores))] if self.cores else []

    @property
    def vllm_cache(self) -> Path | None:
        """The folder into which vLLM writes here alone; None for the user's own."""
        return None if self.caches is None else self.caches / f"vllm-{self.gpu}"

    def environment(self, **changes: str) -> dict[str, str]:
        """Return the environment of a run."""
        caches: dict[str, str] = {}
        if self.caches is not None:
            caches = {key: str(self.caches / name) for key, name in _SHARED.items()}
            caches["VLLM_CACHE_ROOT"] = str(self.vllm_cache)
        return environment(CUDA_VISIBLE_DEVICES=self.gpu, **caches, **changes)


def places(gpus: Sequence[str], folder: Path) -> list[Place]:
    """Return a place for each GPU. Several divide the cores of this machine equally.

    Args:
        folder: parent of their caches.
    """
    if len(gpus) == 1:
        return [Place(gpu) for gpu in gpus]
    cores = sorted(os.sched_getaffinity(0)) if shutil.which("taskset") is not None else []
    share = max(1, len(cores) // len(gpus))
    return [
        Place(gpu, tuple(cores[number * share : (number + 1) * share]), folder / "caches")
        for number, gpu in enumerate(gpus)
    ]


def share_compiled_code(chosen: Sequence[Place]) -> None:
    """Copy vLLM's cache of the first place that has one to those that have none. No run may be in progress."""
    caches = [place.vllm_cache for place in chosen if place.vllm_cache is not None]
    source = next((cache for cache in caches if cache.exists()), None)
    for cache in caches:
        if source is not None and not cache.exists():
            draft = cache.with_name(f"{cache.name}.draft")
            shutil.rmtree(draft, ignore_errors=True)
            shutil.copytree(source, draft, symlinks=True)
            draft.rename(cache)
