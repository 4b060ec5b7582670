"""Environments of the tests: they do what the action says."""

from __future__ import annotations

import asyncio
import os
import random
import time
from pathlib import Path
from typing import Any

from rftcore.environments import Environment, Observation, Step


class Acting(Environment):
    """Counts to a limit; some actions end or block the process."""

    roles = ("agent", "other")

    def __init__(self, limit: int = 3, broken: str = "") -> None:
        self.limit, self.broken = limit, broken

    def reset(self, task: Any, seed: int) -> Observation:
        if self.broken == "raises":
            raise ValueError(f"no episode for {task}")
        self.count = 0
        return Observation(f"{random.random()}", state="0")

    def step(self, action: Any, role: str = "agent") -> Step:
        found = getattr(self, action, None)
        if found is not None:
            return found()  # type: ignore[no-any-return]
        self.count += 1
        return Step(
            Observation(f"{action} {os.getpid()}"), 1.0, terminated=self.count == self.limit, state=f"{self.count}"
        )

    def close(self) -> None:
        if self.broken == "close":
            time.sleep(1000)

    def exits(self) -> None:
        os._exit(3)

    def quits(self) -> None:
        raise SystemExit(4)

    def crashes(self) -> None:
        import ctypes

        ctypes.string_at(0)

    def hangs(self) -> None:
        time.sleep(1000)

    def is_slow(self) -> Step:
        time.sleep(0.3)
        return Step(Observation("late"))

    def is_killed(self) -> None:
        os.kill(os.getpid(), 9)

    def loses_its_connection(self) -> None:
        raise ConnectionResetError("the server is gone")

    def raises_what_has_no_text(self) -> None:
        raise WithoutTextError

    def returns_nothing(self) -> None:
        return None

    def returns_nan(self) -> Step:
        return Step(Observation(""), float("nan"))

    def returns_a_number(self) -> Step:
        return Step(Observation(7))  # type: ignore[arg-type]

    def names_another_role(self) -> Step:
        return Step(Observation("", role="third"))

    def is_huge(self) -> Step:
        return Step(Observation("x" * 1_000_001))

    def has_an_object(self) -> Step:
        return Step(Observation(""), info={"what": object()})

    def prints(self) -> Step:
        print("x" * 10_000_000)
        return Step(Observation("printed"))

    def leaves_processes(self) -> Step:
        """Start a process, and another one that has its own session."""
        reads, writes = os.pipe()
        if os.fork() == 0:
            os.setsid()
            if (pid := os.fork()) == 0:
                time.sleep(1000)
            os.write(writes, f"{pid}".encode())
            os._exit(0)
        if (pid := os.fork()) == 0:
            time.sleep(1000)
        return Step(Observation(f"{pid} {os.read(reads, 99).decode()}"))

    def forks_and_returns(self) -> Step:
        os.fork()
        return Step(Observation("forked"))


class WithoutTextError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class AsyncActing(Environment):
    """Runs in the event loop."""

    deterministic = True

    async def reset(self, task: Any, seed: int) -> Observation:
        return Observation(f"{os.getpid()}")

    async def step(self, action: Any, role: str = "agent") -> Step:
        if action == "hangs":
            await asyncio.sleep(1000)
        if action == "raises":
            raise KeyError(action)
        return Step(Observation(""), terminated=True, reward=None if action == "returns_none" else 1.0)  # type: ignore[arg-type]


class KilledOnce(Environment):
    """Its process is killed in the first step, as for lack of memory, unless that has happened before.

    Args:
        marker: file that remembers it.
    """

    def __init__(self, marker: str) -> None:
        self.marker = Path(marker)

    def reset(self, task: Any, seed: int) -> Observation:
        return Observation("go")

    def step(self, action: Any, role: str = "agent") -> Step:
        if not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), 9)
        return Step(Observation("done"), 1.0, terminated=True)
