"""Results of benchmarks: one JSON object on stdout with the machine and the options, progress on stderr."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rftcore.run.gpus import local_gpus

ROOT = Path(__file__).resolve().parents[2]
"""The checkout."""


def say(line: str) -> None:
    """Report progress."""
    print(line, file=sys.stderr, flush=True)


def write(options: argparse.Namespace, figures: Mapping[str, Any]) -> None:
    """Print the figures with the machine and the options that they were measured with."""
    settings = {name: value for name, value in vars(options).items() if value is not None}
    print(json.dumps({"machine": machine(), "options": settings, **figures}, indent=1, default=str))


def machine() -> dict[str, Any]:
    """Describe the hardware, the load of this machine and the commit of the checkout."""
    cpu = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), ""
    )
    memory = next((int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal:")), 0)
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "cpu": cpu or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**20, 1),
        "gpu_gib": [round(size / 2**30, 1) for size in local_gpus()],
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "commit": git.stdout.strip() or None,
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text(encoding="utf-8").splitlines() if Path(path).exists() else []


def spread(values: Sequence[float | None], digits: int | None = None) -> dict[str, float | None]:
    """Return median, least and greatest of the values that are known; None without any."""
    found = [value for value in values if value is not None]
    if not found:
        return {"median": None, "min": None, "max": None}
    figures = {"median": statistics.median(found), "min": min(found), "max": max(found)}
    return {name: value if digits is None else round(value, digits) for name, value in figures.items()}


def mean(values: Sequence[float]) -> float | None:
    """Return the mean, None without any value."""
    return round(statistics.fmean(values), 4) if values else None


def package_version(package: str) -> str | None:
    """Return the version of an installed package, None without it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def exit_on_sigterm() -> None:
    """Let SIGTERM end this program by an exception, so that servers and processes are stopped."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
