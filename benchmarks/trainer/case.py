"""A case of `rft bench trainer`, and the recorder of its steps."""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.harness.processes import append_line
from benchmarks.harness.shapes import SHAPES
from benchmarks.trainer.batches import Batch, make_batch, make_sequence

System = Literal["ours", "trl", "trl-liger"]
DType = Literal["mixed", "bfloat16", "float32"]
LADDER = "ladder"
# Settings like the learning rate do not change the cost of a step. They are equal for both systems, so that weights stay equal.
LEARNING_RATE = 1.0e-6
CLIP = (0.2, 0.28)
ADVANTAGE_EPS = 1.0e-4  # TRL's


@dataclass(frozen=True)
class Case:
    """System, model, batch and settings of one process.

    Attributes:
        batch: a name of `BATCHES`, or `LADDER`: one sequence a step, longer in every step, until memory is full.
        dtype: mixed is float32 weights and bfloat16 matrix products.
        micro_batch: tokens for our trainer, sequences for TRL.
        copies: of the batch in every step but the first, so that the first loss and gradient are those of one copy.
        steps, warm_up: timed steps and those before them.
        rungs: lengths of the ladder, tokens.
        trainer: further keys of `TrainerConfig` for our trainer.
        profiles: whether one more step, which is not timed, is recorded by the profiler.
    """

    shape: str
    batch: str
    system: System
    dtype: DType
    checkpointing: bool
    micro_batch: int
    ranks: int = 1
    copies: int = 1
    steps: int = 3
    warm_up: int = 2
    scale: float = 1.0
    rungs: tuple[int, ...] = ()
    trainer: tuple[tuple[str, Any], ...] = ()
    profiles: bool = False

    def batches(self) -> list[Batch]:
        """Return the batch of every step."""
        shape = SHAPES[self.shape]
        if self.batch == LADDER:
            return [make_sequence(length, shape) for length in self.rungs]
        batch = make_batch(self.batch, shape, scale=self.scale)
        return [
            batch,
            *[batch.repeated(self.copies, shape.vocab_size)] * (self.warm_up + self.steps + self.profiles - 1),
        ]


class CollectionTime:
    """Adds up the time of Python's garbage collections.

    Attributes:
        seconds: since it was last set to 0.
    """

    def __init__(self) -> None:
        self.seconds = self._begun = 0.0
        gc.callbacks.append(self._count)

    def _count(self, phase: Literal["start", "stop"], _: dict[str, int]) -> None:
        if phase == "start":
            self._begun = time.perf_counter()
        else:
            self.seconds += time.perf_counter() - self._begun


class Recorder:
    """Times steps and appends them to a file. A step is `begin`, the work, `end`, `write`.

    Args:
        profiles: whether the last step is recorded by the profiler; its line has a `profile`.
    """

    def __init__(self, file: Path, batches: Sequence[Batch], *, profiles: bool = False) -> None:
        import torch

        from benchmarks.trainer.kernels import StepProfile

        self._cuda = torch.cuda if torch.cuda.is_available() else None
        self._file = file
        self._tokens = [batch.num_tokens for batch in batches]
        self._step = 0
        self._profile = StepProfile() if profiles else None
        self._collections = CollectionTime()
        self._begun = self._paused = 0.0

    def now(self) -> float:
        """Wait for the device; return the time in seconds."""
        if self._cuda:
            self._cuda.synchronize()
        return time.perf_counter()

    def begin(self) -> None:
        if self._cuda:
            self._cuda.reset_peak_memory_stats()
        self._paused = self._collections.seconds = 0.0
        self._begun = self.now()
        if self._profile is not None and self._is_last:
            self._profile.start()
            self._begun = self.now()

    def pause(self, seconds: float) -> None:
        """Subtract time that does not belong to the optimisation step."""
        self._paused += seconds

    def end(self) -> dict[str, Any]:
        """Return seconds and memory of the step, for `write`."""
        seconds = self.now() - self._begun - self._paused
        measured: dict[str, Any] = {
            "seconds": seconds,
            "peak_gib": self._peak_bytes() / 2**30,
            "collection_ms": 1e3 * self._collections.seconds,
        }
        if self._profile is not None and self._is_last:
            measured["profile"] = self._profile.stop(seconds)
        return measured

    def write(
        self, measured: dict[str, Any], *, loss: float, grad_norm: float, computed_tokens: float | None = None
    ) -> None:
        """Append a step. `computed_tokens` is given where shared tokens are computed once."""
        num_tokens = self._tokens[self._step]
        known = {
            "num_tokens": num_tokens,
            "computed_tokens": computed_tokens or num_tokens,
            "loss": loss,
            "grad_norm": grad_norm,
        }
        append_line(self._file, known | measured)
        self._step += 1

    @property
    def _is_last(self) -> bool:
        return self._step == len(self._tokens) - 1

    def _peak_bytes(self) -> int:
        if self._cuda:
            return int(self._cuda.max_memory_allocated())
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
