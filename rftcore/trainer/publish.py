"""How weights get into the file that a publisher hands to engines: from the learner, or from a model's folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rftcore.sync.weights_file import iterate_weights, write_weights

if TYPE_CHECKING:
    from torch import Tensor

    from rftcore.trainer.ranks import LearnerGroup

Export = Callable[[Path], object]


def export_learner(learner: LearnerGroup) -> Export:
    """Writes the learner's weights as they are now."""
    return lambda path: write_weights(learner.export_tensors(), path)


def export_folder(folder: Path) -> Export:
    """Writes the weights of a model's or checkpoint's folder."""

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for file in sorted(folder.glob("*.safetensors")):
            yield from iterate_weights(file)

    return lambda path: write_weights(tensors(), path)


def folder_bytes(folder: Path) -> int:
    """Size of a folder's files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
