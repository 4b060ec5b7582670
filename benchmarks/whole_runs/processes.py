"""A run as a process of its own group, which ends by itself, at its target, or at its limit."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_POLL_S = 1.0
_STOP_S = 60.0


def run_until(
    command: Sequence[str], log: Path, environment: Mapping[str, str], limit_s: float, has_reached: Callable[[], bool]
) -> tuple[str, int | None]:
    """Start a program, and interrupt it once it has reached its target or its limit.

    Args:
        log: receives its output.

    Returns:
        how it ended (`ended`, `reached` or `out of time`), and its exit code.
    """
    deadline, ended = time.monotonic() + limit_s, "ended"
    with log.open("wb") as output:
        process = subprocess.Popen(
            list(command), stdout=output, stderr=subprocess.STDOUT, env=dict(environment), start_new_session=True
        )
    try:
        while process.poll() is None and ended == "ended":
            time.sleep(_POLL_S)
            if time.monotonic() > deadline:
                ended = "out of time"
            elif has_reached():
                ended = "reached"
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return ended, process.returncode


def last_lines(log: Path, num: int = 12) -> str:
    """Return the last lines of a program's output."""
    lines = [line.rstrip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return "\n".join(lines[-num:])
