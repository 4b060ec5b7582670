"""The usage of model calls by stages, and its limits.

A call reserves its maximum cost before it is sent, and is settled with its actual cost. A limit is therefore exceeded only by the error
of an estimate, however many workers spend. The reservation of a killed worker stays spent, which is on the safe side.
`RunUsage` counts in the database, for all workers of a run and across restarts. `MemoryUsage` counts in this process, without a run.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from rftdata.errors import BufferUnavailableError
from rftdata.postgres.retry import ride_out
from rftdata.run import Run


@dataclass(frozen=True)
class Usage:
    """Requests, tokens of prompts and answers, and their cost in the currency of the prices."""

    calls: int = 0
    tokens: int = 0
    cost: float = 0.0

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.calls + other.calls, self.tokens + other.tokens, self.cost + other.cost)

    def __sub__(self, other: Usage) -> Usage:
        return Usage(self.calls - other.calls, self.tokens - other.tokens, self.cost - other.cost)


@dataclass(frozen=True)
class Limits:
    """The highest allowed usage; None means no limit."""

    max_calls: int | None = None
    max_tokens: int | None = None
    max_cost: float | None = None

    def allow(self, spent: Usage) -> bool:
        """Return whether the limits allow this total usage."""
        return (
            (self.max_calls is None or spent.calls <= self.max_calls)
            and (self.max_tokens is None or spent.tokens <= self.max_tokens)
            and (self.max_cost is None or spent.cost <= self.max_cost)
        )


class UsageLedger(Protocol):
    """Counts usage by the name of the budget."""

    def reserve(self, name: str, amount: Usage, limits: Limits) -> bool:
        """Add `amount` if the limits allow it; return whether they did."""

    def settle(self, name: str, reserved: Usage, used: Usage) -> None:
        """Replace the reservation for a call by its actual usage."""

    def spent(self, name: str) -> Usage:
        """Return the total usage, including reservations."""


class MemoryUsage:
    """A ledger in this process, for several threads."""

    def __init__(self) -> None:
        self._spent: defaultdict[str, Usage] = defaultdict(Usage)
        self._lock = threading.Lock()

    def reserve(self, name: str, amount: Usage, limits: Limits) -> bool:
        with self._lock:
            allowed = limits.allow(self._spent[name] + amount)
            if allowed:
                self._spent[name] += amount
        return allowed

    def settle(self, name: str, reserved: Usage, used: Usage) -> None:
        with self._lock:
            self._spent[name] += used - reserved

    def spent(self, name: str) -> Usage:
        with self._lock:
            return self._spent[name]


class RunUsage:
    """A ledger of a run, in `rft.endpoint_usage`.

    Args:
        run: the run.
    """

    def __init__(self, run: Run) -> None:
        self._database = run.database
        self._run_id = run.run_id
        self._opened: set[str] = set()

    def reserve(self, name: str, amount: Usage, limits: Limits) -> bool:
        self._open(name)

        def reserve() -> int:
            return self._database.run(
                "reserve_usage",
                run_id=self._run_id,
                name=name,
                calls=amount.calls,
                tokens=amount.tokens,
                cost=amount.cost,
                max_calls=limits.max_calls,
                max_tokens=limits.max_tokens,
                max_cost=limits.max_cost,
            )

        # Reserved twice if the answer to the first try was lost: usage is overestimated, never underestimated.
        return ride_out(reserve) > 0

    def settle(self, name: str, reserved: Usage, used: Usage) -> None:
        change = used - reserved
        # Tried once, because a second try could subtract usage twice. If it fails, the reservation stays.
        with suppress(BufferUnavailableError):
            self._database.run(
                "settle_usage",
                run_id=self._run_id,
                name=name,
                calls=change.calls,
                tokens=change.tokens,
                cost=change.cost,
            )

    def spent(self, name: str) -> Usage:
        rows = self._database.fetch("usage_of_run", run_id=self._run_id, name=name)
        return Usage(rows[0]["num_calls"], rows[0]["num_tokens"], rows[0]["cost"]) if rows else Usage()

    def _open(self, name: str) -> None:
        if name not in self._opened:
            ride_out(lambda: self._database.run("open_usage", run_id=self._run_id, name=name))
            self._opened.add(name)
