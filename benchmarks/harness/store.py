"""What a store does in the buffer benchmark. Peers import this module in environments of their own, which have numpy and the standard library only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from benchmarks.harness.workload import Sample


class Store(ABC):
    """Connection of one process to a store. A module of `benchmarks/peers` has one subclass, named `STORE`.

    Args:
        address: what `start` returned.
    """

    package: ClassVar[str] = ""
    """Distribution whose version is reported."""

    def __init__(self, address: dict[str, Any]) -> None:
        self.address = address

    @classmethod
    def start(cls, address: dict[str, Any]) -> dict[str, Any]:
        """Start the servers that processes connect to, once; return the address with what processes need."""
        return address

    @classmethod
    def stop(cls) -> None:
        """Stop the servers."""
        return

    def create(self, space: str) -> None:
        """Create an empty space (a table, a queue, a run); called by one process."""
        return

    @abstractmethod
    def open(self, space: str) -> None:
        """Use this space from now on."""

    @abstractmethod
    def convert(self, samples: Sequence[Sample]) -> Any:
        """Return the samples in the store's own type."""

    @abstractmethod
    def put(self, batch: Any) -> None:
        """Store a batch of `convert`; return when the store confirms it."""

    @abstractmethod
    def take(self, num: int) -> Iterable[int]:
        """Wait for `num` experiences and decode their three arrays; return their keys. An experience is returned once."""

    def close(self, space: str) -> None:
        """Free a space that is not used any more."""
        return


def keys_of(token_ids: Iterable[Any]) -> list[int]:
    """Return the key of each experience: its first token."""
    return [int(tokens[0]) for tokens in token_ids]
