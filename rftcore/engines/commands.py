"""Commands to the driving thread of an engine; see `rftcore.engines.driver`."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from rftcore.engines.base import Decoding, Generation
from rftcore.engines.request_work import RequestWork
from rftcore.engines.token_reports import TokenReport
from rftcore.sync.transfer.plan import TransferPlan

Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class Request:
    """Generate one response.

    Attributes:
        request_id: unique within the engine.
        name: the caller's name of the request.
        tokens: reports what is sampled, if the caller listens.
    """

    request_id: str
    prompt_token_ids: list[int]
    decoding: Decoding
    work: RequestWork
    name: str = ""
    tokens: TokenReport | None = None
    result: Future[Generation] = field(default_factory=Future)


@dataclass(frozen=True, eq=False)
class Cancel:
    """Remove a request."""

    request_id: str


@dataclass(frozen=True, eq=False)
class AwaitedCommand(Generic[Result]):
    """A command whose caller waits for its result."""

    result: Future[Result] = field(default_factory=Future, kw_only=True)


@dataclass(frozen=True, eq=False)
class Load(AwaitedCommand[None]):
    """Load weights from a file."""

    path: Path | None
    """None keeps the weights and changes only their version."""
    policy_version_id: int


@dataclass(frozen=True, eq=False)
class Receive(AwaitedCommand[str]):
    """Take part in a transfer of weights; the result is the checksum of what arrived."""

    plan: TransferPlan
    policy_version_id: int


@dataclass(frozen=True, eq=False)
class Compare(AwaitedCommand[list[str]]):
    """Compare the weights with those of a file; the result names the tensors that differ."""

    path: Path


@dataclass(frozen=True, eq=False)
class Unfinished(AwaitedCommand[dict[str, Generation]]):
    """Report what open requests have sampled, by their names.

    Attributes:
        first_tokens: name of each request, with the first token that is asked for.
    """

    first_tokens: Mapping[str, int]


class Sleep(AwaitedCommand[None]):
    """Free the device's memory."""


@dataclass(frozen=True, eq=False)
class WakeUp(AwaitedCommand[bool]):
    """Take the device's memory again; the result is whether the engine has its weights."""

    weights_only: bool


class Nudge:
    """Make the thread check `_closing`."""
