"""What the driving thread of an engine is asked to do; see `rftcore.engines.driver`."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from rftcore.engines.base import Decoding, Generation
from rftcore.engines.request_work import RequestWork
from rftcore.sync.transfer.plan import TransferPlan


@dataclass(frozen=True, eq=False)
class Request:
    """One response to generate; `request_id` is unique within the engine, `name` is the caller's."""

    request_id: str
    prompt_token_ids: list[int]
    decoding: Decoding
    work: RequestWork
    name: str = ""
    result: Future[Generation] = field(default_factory=Future)


@dataclass(frozen=True, eq=False)
class Cancel:
    """Remove a request."""

    request_id: str


@dataclass(frozen=True, eq=False)
class Load:
    """Load weights from a file."""

    path: Path | None
    """None keeps the weights and changes only their version."""
    policy_version_id: int
    result: Future[None] = field(default_factory=Future)


@dataclass(frozen=True, eq=False)
class Receive:
    """Take part in a transfer of weights."""

    plan: TransferPlan
    policy_version_id: int
    result: Future[str] = field(default_factory=Future)


@dataclass(frozen=True, eq=False)
class Compare:
    """Compare the weights with a file's."""

    path: Path
    result: Future[list[str]] = field(default_factory=Future)


@dataclass(frozen=True, eq=False)
class Unfinished:
    """Tell what open requests have sampled, from a token on, by their names."""

    first_tokens: Mapping[str, int]
    result: Future[dict[str, Generation]] = field(default_factory=Future)


@dataclass(frozen=True, eq=False)
class Sleep:
    """Give the device's memory back."""

    result: Future[None] = field(default_factory=Future)


@dataclass(frozen=True, eq=False)
class WakeUp:
    """Take the device's memory again."""

    weights_only: bool
    result: Future[bool] = field(default_factory=Future)


class Nudge:
    """Makes the thread check `_closing`."""


Command = Request | Load | Receive | Compare | Unfinished | Sleep | WakeUp
