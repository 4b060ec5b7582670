"""The model of an engine, as the engine's driving thread uses it; see `rftcore.engines.driver`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from pathlib import Path

from rftcore.engines.base import Generation
from rftcore.engines.commands import Request
from rftcore.sync.transfer.plan import TransferPlan
from rftdata.errors import RftError


class DrivenModel(ABC):
    """What an engine implements to be driven. Every method is called in the driving thread."""

    _context_length: int
    """Maximum tokens of prompt and response; set by `_open_model`."""

    @abstractmethod
    def _open_model(self) -> None:
        """Load the model, and set its context length."""

    @abstractmethod
    def _add(self, request: Request) -> None:
        """Accept a request; raise RftError if it cannot be served."""

    @abstractmethod
    def _abort(self, request_id: str) -> None:
        """Remove a request."""

    @abstractmethod
    def _step(self) -> list[tuple[str, Generation]]:
        """Do a bounded piece of work; return the finished generations."""

    @abstractmethod
    def _works_on(self) -> Collection[str]:
        """Return the ids of the requests that were computed since the last call, without those that waited all the time."""

    def _interrupt(self) -> None:
        """Let the present `_step` return soon, for a model that computes in a process of its own. Called in any thread."""
        return

    def _pause(self) -> None:
        """Let a model that computes in a process of its own finish its present step, and begin none before `_resume`."""
        return

    def _resume(self) -> None:
        """Let the model compute again."""
        return

    def _unfinished(self, request_id: str, first_token: int) -> Generation | None:
        """Return what an open request has sampled from a token on; None if nothing is known of it yet."""
        return None

    @abstractmethod
    def _replace_weights(self, path: Path) -> None:
        """Load a complete weights file, or one of adapters; nothing computed with the old weights may be used afterwards."""

    def _receive_weights(self, plan: TransferPlan) -> str:
        """Take part in a transfer, as `_replace_weights`; return the checksum of what arrived.

        Raises:
            TransferError: it failed.
        """
        raise RftError(f"{type(self).__name__} takes no weights from a trainer", todo="set sync.method: memory")

    def _differing_weights(self, path: Path) -> list[str]:
        """Load a second model from a complete weights file; return the names of the tensors in which the engine differs from it."""
        raise RftError(f"{type(self).__name__} cannot compare its weights", todo="set sync.check_weights: false")

    def _fall_asleep(self) -> None:
        """Free the device's memory; requests stay."""
        raise RftError(f"{type(self).__name__} does not sleep", todo="set explorer.sleep: false")

    def _loses_weights_asleep(self) -> bool:
        """Return whether weights must be loaded after `_wake_up`."""
        return True

    @abstractmethod
    def _wake_up(self, weights_only: bool) -> None:
        """Take the device's memory again, or only that for weights."""

    @abstractmethod
    def _name_version(self, policy_version_id: int) -> None:
        """Assign this version to the tokens from the next one on."""

    @abstractmethod
    def _close_model(self) -> None:
        """Free the model."""
