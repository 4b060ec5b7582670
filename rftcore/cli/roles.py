"""`rft explore|process|train`: one role in this process; it finds the others through the buffer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rftcore.cli.run import SetOption, configuration
from rftcore.cli.session import BufferOption

ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's configuration file.")]
RunOption = Annotated[str | None, typer.Option("--run", metavar="RUN", help="The run to join; the newest of the file's name by default.")]


def explore(config: ConfigArgument, overrides: SetOption = None, run: RunOption = None, buffer: BufferOption = None) -> None:
    """Sample rollouts for a run."""
    from rftcore.explorer import role

    raise typer.Exit(role.main(configuration(config, None, overrides, buffer), run) or 0)


def process(config: ConfigArgument, overrides: SetOption = None, run: RunOption = None, buffer: BufferOption = None) -> None:
    """Run the experience pipeline of a run."""
    from rftcore.pipeline import role

    raise typer.Exit(role.main(configuration(config, None, overrides, buffer), run) or 0)


def train(config: ConfigArgument, overrides: SetOption = None, run: RunOption = None, buffer: BufferOption = None) -> None:
    """Train on the experiences of a run."""
    from rftcore.trainer import role

    raise typer.Exit(role.main(configuration(config, None, overrides, buffer), run) or 0)
