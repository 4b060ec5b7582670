"""`rft` as a program of its own, from this checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.harness.report import ROOT


def command(*arguments: object) -> list[str]:
    """Return the command of `rft …`."""
    return [sys.executable, "-m", "rftcore", *map(str, arguments)]


def environment(**changes: str) -> dict[str, str]:
    """Return the environment of a call: this checkout, and no downloads."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "COLUMNS": "160", "NO_COLOR": "1", **changes}


def call(command: list[str], folder: Path, log: Path, *, limit_s: float, environment: Mapping[str, str]) -> None:
    """Run a command in a folder to its end; its output goes to `log`.

    Raises:
        RuntimeError: the exit code is not 0; the message has the end of the output.
    """
    with log.open("wb") as file:
        done = subprocess.run(
            command, cwd=folder, env=environment, stdout=file, stderr=subprocess.STDOUT, timeout=limit_s, check=False
        )
    if done.returncode:
        raise RuntimeError(f"{log.stem} ended with {done.returncode}:\n{log.read_text(errors='replace')[-4000:]}")
