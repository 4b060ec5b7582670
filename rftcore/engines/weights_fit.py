"""Refusal of weights that an engine cannot take: those of another model, or adapters in place of whole weights and the reverse."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rftcore.sync.files.adapters_file import adapters_config, refuse_unfit_adapters
from rftcore.sync.files.weights_file import read_shapes, refuse_incomplete
from rftcore.sync.tensors import AdaptersConfig
from rftdata.errors import ModelError


@dataclass(frozen=True)
class WeightsFit:
    """Refuses weights that do not fit an engine.

    Attributes:
        shapes: shapes of the tensors in the checkpoint of its model, by name.
        adapter_rank: largest rank of the adapters that it takes; None if it takes whole weights.
    """

    shapes: Mapping[str, tuple[int, ...]]
    adapter_rank: int | None

    def refuse_file(self, path: Path) -> None:
        """Refuse a file that would leave part of the model unchanged, or that the engine does not take.

        Raises:
            ModelError: the file does not fit.
        """
        self.refuse(read_shapes(path), adapters_config(path), f"the file {path}")

    def refuse(self, tensors: Mapping[str, tuple[int, ...]], adapters: AdaptersConfig | None, what: str) -> None:
        """Refuse tensors that would leave part of the model unchanged, or that the engine does not take.

        Args:
            tensors: shapes by name.
            adapters: peft's configuration, if they are adapters.
            what: their name in the error.

        Raises:
            ModelError: they do not fit.
        """
        self._refuse_other_kind(adapters, what)
        if adapters is None:
            refuse_incomplete(tensors, self.shapes, what)
        else:
            refuse_unfit_adapters(dict(tensors), dict(self.shapes), what)

    def _refuse_other_kind(self, adapters: AdaptersConfig | None, what: str) -> None:
        rank = self.adapter_rank
        if (adapters is None) != (rank is None):
            given, taken = ("whole weights", "adapters") if adapters is None else ("adapters", "whole weights")
            raise ModelError(
                f"{what} consists of {given}, and this engine was started for {taken} only",
                todo="start trainer and explorers with the same sync.adapters",
            )
        if adapters is not None and rank is not None and adapters["r"] > rank:
            raise ModelError(
                f"{what} consists of adapters of a rank that this engine has no room for",
                value=adapters["r"],
                allowed=f"up to {rank}",
                todo="start trainer and explorers with the same trainer.lora",
            )
