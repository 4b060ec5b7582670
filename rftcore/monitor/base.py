"""What a monitor is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path


class Monitor(ABC):
    """Receives numbers as a run goes on. The buffer has them all; a monitor only shows them elsewhere.

    Args:
        run_name: the run's name.
        folder: the run's folder; the monitor may write below it.
    """

    @abstractmethod
    def __init__(self, run_name: str, folder: Path) -> None: ...

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics of a trainer step. The same step may be logged more than once, with other names, and again
        after a resume, with the same names: the newest counts."""

    @abstractmethod
    def close(self) -> None:
        """Write what is held back; nothing is logged afterwards."""
