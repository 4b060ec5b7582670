"""How weights get to engines: straight from the learner, or through the file that a publisher hands over, from the learner or a model's folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rftcore.sync.base import Publication
from rftcore.sync.live_trainer import LiveWeights
from rftcore.sync.weights_file import iterate_weights, write_weights
from rftdata.config import SyncConfig
from rftdata.training.attempt import Attempt
from rftdata.workers import Worker

if TYPE_CHECKING:
    from torch import Tensor

    from rftcore.trainer.ranks import LearnerGroup

Export = Callable[[Path], object]
_LIVE = ("auto", "nccl")


def export_learner(learner: LearnerGroup) -> Export:
    """Writes the learner's weights as they are now."""
    return lambda path: write_weights(learner.export_tensors(), path)


def export_folder(folder: Path) -> Export:
    """Writes the weights of a model's or checkpoint's folder."""

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for file in sorted(folder.glob("*.safetensors")):
            yield from iterate_weights(file)

    return lambda path: write_weights(tensors(), path)


def file_method(config: SyncConfig) -> str:
    """Name of the method by which weights become files."""
    return config.file_method if config.method in _LIVE else config.method


def live_weights(
    config: SyncConfig,
    attempt: Attempt,
    worker: Worker,
    learner: LearnerGroup,
    write_file: Callable[[str], Publication],
) -> LiveWeights | None:
    """Return what sends the learner's weights straight into engines; None with a method that uses files alone."""
    if config.method not in _LIVE:
        return None
    return LiveWeights(attempt, config, learner, write_file, lambda choice: worker.progress.update(weights=choice))


def folder_bytes(folder: Path) -> int:
    """Size of a folder's files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
