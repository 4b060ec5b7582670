"""The ways of weights to engines: directly from the learner, or through a file that is written from the learner or from a model's folder."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rftcore.sync.base import Publication
from rftcore.sync.fallback import LivePublisher
from rftcore.sync.files.adapters_file import write_adapters
from rftcore.sync.files.weights_file import iterate_weights, read_shapes_of_model
from rftcore.sync.files.weights_stream import ITEM_BYTES, layout, stream_weights
from rftcore.sync.tensors import WireTensor, shapes_of
from rftcore.trainer.network.lora import adapters_json, stored_adapters
from rftcore.trainer.network.network import ADAPTERS
from rftdata.attempts.attempt import Attempt
from rftdata.config import SyncConfig
from rftdata.workers.worker import Worker

if TYPE_CHECKING:
    from torch import Tensor

    from rftcore.config.trainer import LoraConfig
    from rftcore.trainer.processes.learner_group import LearnerGroup

Export = Callable[[Path], object]
_LIVE = ("auto", "nccl")


class Exports:
    """Functions that write files for engines: whole weights, or adapters alone.

    Args:
        adapters: the configuration of adapters that engines get alone; None where they get whole weights.
        dtype: type of the engines' weights.
        merges: whether engines get weights that adapters are merged into.
    """

    def __init__(
        self, learner: LearnerGroup, adapters: LoraConfig | None, dtype: str = "float32", merges: bool = False
    ) -> None:
        self._learner = learner
        self._adapters = adapters
        self._dtype = dtype
        self._merges = merges
        self._tensors: tuple[WireTensor, ...] = ()  # never change; computing them merges the adapters

    def metrics(self) -> dict[str, float]:
        """Return how much of the learner's current weights engines do not get; on several GPUs, for the share of the first one.

        Returns:
            merged_update_error: share of the adapters' update that is lost where merged weights are rounded.
        """
        if not self._merges or self._dtype == "float32":
            return {}
        import torch

        error = self._learner.own.policy.merged_update_error(getattr(torch, self._dtype))
        return {"merged_update_error": error}

    def of_learner(self, in_float32: Collection[str] = ()) -> Export:
        """Return a function that writes the learner's weights; each rank writes its share.

        Args:
            in_float32: names of weights that engines keep in float32.
        """
        learner, adapters = self._learner, self._adapters
        if adapters is None:
            self._tensors = self._tensors or learner.weight_tensors()
            return partial(
                learner.write_weights, layout(dict(shapes_of(self._tensors)), self._dtype, in_float32), self._tensors
            )
        return lambda path: write_adapters(learner.own.policy.adapter_tensors(), adapters_json(adapters), path)

    def of_folder(self, folder: Path) -> Export:
        """Return a function that writes the weights of a model's or checkpoint's folder; the model that the run began with has no adapters."""
        adapters = self._adapters
        if adapters is not None:
            return lambda path: write_adapters(stored_adapters(folder / ADAPTERS), adapters_json(adapters), path)

        def tensors() -> Iterator[tuple[str, Tensor]]:
            for file in sorted(folder.glob("*.safetensors")):
                yield from iterate_weights(file)

        places = layout(read_shapes_of_model(folder), self._dtype)
        return lambda path: stream_weights(places, tensors(), path)


def file_method(config: SyncConfig) -> str:
    """Return the name of the method that writes weights into files."""
    return config.file_method if config.method in _LIVE else config.method


def live_weights(
    config: SyncConfig,
    attempt: Attempt,
    worker: Worker,
    learner: LearnerGroup,
    write_file: Callable[[str], Publication],
    adapters: LoraConfig | None,
) -> LivePublisher | None:
    """Return the sender of the learner's weights into live engines; None with a method that uses files alone.

    Args:
        adapters: see `Exports`.
    """
    if config.method not in _LIVE:
        return None
    return LivePublisher(
        attempt,
        config,
        learner,
        write_file,
        lambda choice: worker.progress.update(weights=choice),
        None if adapters is None else adapters_json(adapters),
    )


def folder_bytes(folder: Path) -> int:
    """Return the size of a folder's files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def published_bytes(folder: Path, dtype: str) -> int:
    """Return the size of the weights of the model in a folder, with a copy of its largest matrix as the output head."""
    sizes = [math.prod(shape) for shape in read_shapes_of_model(folder).values()]
    return ITEM_BYTES[dtype] * (sum(sizes) + max(sizes, default=0))
