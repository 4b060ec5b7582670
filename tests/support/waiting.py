"""Waiting for what other processes and threads do."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from rftdata.processes import process_lives

# It ends what hangs, and measures nothing: machines that run tests are at times several times as slow as at others.
PATIENCE_S = 240.0
# The same for a whole run of the product.
RUN_S = 900.0

T = TypeVar("T")


def wait_until(
    holds: Callable[[], object],
    what: str = "what was waited for",
    *,
    process: subprocess.Popen[Any] | None = None,
    pause_s: float = 0.05,
) -> None:
    """Wait until something holds.

    Args:
        holds: asked again and again.
        what: named in the error.
        process: its end is an error, with what it printed.
        pause_s: between two looks.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert process is None or process.poll() is None, f"the process ended before {what}:\n{process.communicate()}"
        assert time.monotonic() < deadline, f"{what} did not come to pass in {PATIENCE_S:g} s"
        time.sleep(pause_s)


def wait_until_ended(pids: Iterable[int]) -> None:
    """Wait for processes that end with another one, as ranks do with their trainer: just after it."""
    pids = list(pids)
    wait_until(lambda: not any(map(process_lives, pids)), f"the end of the processes {pids}", pause_s=0.02)


def printed_by(process: subprocess.Popen[str], patience_s: float = RUN_S) -> str:
    """What a process prints until it ends. One that does not, or whose test is interrupted, is killed."""
    try:
        return process.communicate(timeout=patience_s)[0]
    except subprocess.TimeoutExpired as error:
        process.kill()
        raise AssertionError(f"it did not end in {patience_s:g} s:\n{process.communicate()[0]}") from error
    except BaseException:
        process.kill()
        raise


def until_it_happens(attempt: Callable[[], T | None], what: str) -> T:
    """Try again until an attempt meets a situation that no test can hold, such as a request that is open at the very moment of an update.

    Args:
        attempt: returns what it found; None if the situation did not occur.
        what: named in the error.
    """
    deadline = time.monotonic() + PATIENCE_S
    while (found := attempt()) is None:
        assert time.monotonic() < deadline, f"{what}: not once in {PATIENCE_S:g} s"
    return found
