"""`rft bench NAME`: runs the benchmarks as separate programs, with JSON on stdout and progress on stderr."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from rftdata.errors import ConfigError

_FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def bench(
    context: typer.Context,
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the benchmark. An unknown name lists the available ones.")
    ],
) -> None:
    """Run a benchmark. Options after NAME are those of the benchmark (`rft bench buffer --help`)."""
    if name in ("-h", "--help"):
        print(context.get_help())
        return
    benchmarks = sorted(
        [file.stem for file in _FOLDER.glob("*.py") if "def main(" in file.read_text(encoding="utf-8")]
        + [file.parent.name for file in _FOLDER.glob("*/__main__.py")]
    )
    if not benchmarks:
        raise ConfigError("benchmarks are part of a checkout, not of the installed package", value=str(_FOLDER))
    if name not in benchmarks:
        raise ConfigError("unknown benchmark", value=name, allowed=", ".join(benchmarks))
    command = [sys.executable, "-m", f"benchmarks.{name}", *context.args]
    raise typer.Exit(subprocess.run(command, cwd=_FOLDER.parent, check=False).returncode)
