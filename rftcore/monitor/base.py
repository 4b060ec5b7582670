"""Interface of a monitor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path


class Monitor(ABC):
    """Receives numbers during a run. The buffer stores all of them; a monitor only shows them elsewhere.

    Args:
        run_name: the run's name.
        folder: the run's folder; the monitor may write below it.
    """

    @abstractmethod
    def __init__(self, run_name: str, folder: Path) -> None: ...

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics of a trainer step. A step may be logged several times: with other names, and after a resume with the
        same names; the newest value counts."""

    @abstractmethod
    def close(self) -> None:
        """Write buffered values; nothing is logged afterwards."""
