"""`rft bench NAME`: runs the benchmarks as separate programs, with JSON on stdout and progress on stderr."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from rftdata.errors import ConfigError

_CHECKOUT = Path(__file__).resolve().parents[2]


def bench(
    context: typer.Context,
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the benchmark. Without it, all benchmarks are listed.")
    ] = "",
) -> None:
    """Run a benchmark. Options after NAME are those of the benchmark (`rft bench buffer --help`)."""
    if name in ("-h", "--help"):
        print(context.get_help())
        return
    if not (_CHECKOUT / "benchmarks").is_dir():
        raise ConfigError("benchmarks are part of a checkout, not of the installed package", value=str(_CHECKOUT))
    command = [sys.executable, "-m", "benchmarks", *filter(None, [name]), *context.args]
    raise typer.Exit(subprocess.run(command, cwd=_CHECKOUT, check=False).returncode)
