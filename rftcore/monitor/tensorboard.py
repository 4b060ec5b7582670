"""TensorBoard event files under `<run folder>/tensorboard`; written by tensorboard itself, so torch is not needed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from tensorboard.summary import Writer

from rftcore.monitor.base import Monitor


class TensorBoard(Monitor):
    """One event file per process; show them with `tensorboard --logdir <run folder>/tensorboard`."""

    def __init__(self, run_name: str, folder: Path) -> None:
        self._writer = Writer(str(folder / "tensorboard" / run_name))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            # With a NaN, TensorBoard draws nothing at all for the name; the buffer keeps it.
            if math.isfinite(value):
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
