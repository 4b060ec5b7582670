"""Division of the GPUs of a machine, in the notation of options: `3+1`, `2x2+4`."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass

_NOTATION = re.compile(r"(?:(?P<engines>[1-9]\d*)(?:x(?P<parts>[1-9]\d*))?)\+(?P<ranks>[1-9]\d*)")


@dataclass(frozen=True)
class Layout:
    """Engines with GPUs of their own, and the GPUs of the trainer.

    Attributes:
        tensor_parallel: GPUs of each engine.
        ranks: ranks of the trainer, each with a GPU.
        shares: one engine and one rank use the same GPU.
    """

    engines: int
    tensor_parallel: int
    ranks: int
    shares: bool = False

    @property
    def num_gpus(self) -> int:
        return 1 if self.shares else self.engines * self.tensor_parallel + self.ranks

    def __str__(self) -> str:
        if self.shares:
            return "1"
        parts = "" if self.tensor_parallel == 1 else f"x{self.tensor_parallel}"
        return f"{self.engines}{parts}+{self.ranks}"


def too_few_gpus(needed: int, there: int) -> str | None:
    """Return why a machine has too few GPUs, None if it has enough."""
    return f"needs {needed} GPUs, the machine has {there}" if needed > there else None


def layouts(text: str) -> tuple[Layout, ...]:
    """Parse layouts with commas between them.

    Raises:
        argparse.ArgumentTypeError: one is not written as `engines+ranks` or `enginesxGPUs+ranks`.
    """
    return tuple(map(_layout, text.split(",")))


def _layout(text: str) -> Layout:
    found = _NOTATION.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"not a layout: {text!r}; allowed: engines+ranks, as 3+1, or enginesxGPUs+ranks, as 2x2+4"
        )
    return Layout(int(found["engines"]), int(found["parts"] or 1), int(found["ranks"]))
