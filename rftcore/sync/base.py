"""Interface of publishers, which hand a trainer's weights to engines as files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

LIVE_URI = "live:"
"""The `uri` of a version that is in engines only, and in no file."""


@dataclass(frozen=True)
class Publication:
    """One set of weights that engines can load; the columns of `rft.policy_version` that describe it.

    Attributes:
        uri: location, the argument of `Engine.load_weights`.
        num_bytes: size.
        checksum: xxh3_64 of those bytes, 16 hex digits.
    """

    uri: str
    num_bytes: int
    checksum: str


class Publisher(ABC):
    """Publishes sets of weights, one after the other, and removes older ones.

    Args:
        run_folder: the run's own folder.
        run_name: unique among the runs of this host.
        attempt_id: id of the publishing attempt, which holds the run.
        num_bytes: approximate size of one set of weights.
    """

    @abstractmethod
    def __init__(self, run_folder: Path, run_name: str, attempt_id: int, num_bytes: int) -> None: ...

    @abstractmethod
    def publish(self, name: str, export: Callable[[Path], object], in_use: Collection[str] = ()) -> Publication:
        """Make one set of weights available.

        Args:
            name: name of this set, unique in the attempt (`step-000012`).
            export: writes the full weights as one safetensors file to the given path.
            in_use: uris of earlier sets that must stay because an evaluation or engine still has to load them.

        Raises:
            DiskFullError: there is no space; nothing was published.
        """

    @abstractmethod
    def close(self) -> None:
        """Remove files that only a running engine could use."""
