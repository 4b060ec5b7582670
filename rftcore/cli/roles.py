"""`rft explore|train`: one role in this process; it finds the others through the buffer.

The configuration is read before a role's packages are imported, so that a mistake in it is told at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rftcore.cli.run import SetOption, configuration
from rftcore.cli.session import ConfigBufferOption

ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's configuration file.")]
RunOption = Annotated[
    str | None, typer.Option("--run", metavar="RUN", help="The run to join; the newest of the file's name by default.")
]


def explore(
    config: ConfigArgument, overrides: SetOption = None, run: RunOption = None, buffer: ConfigBufferOption = None
) -> None:
    """Sample rollouts for a run."""
    resolved = configuration(config, overrides, buffer)
    from rftcore.explorer import role

    raise typer.Exit(role.main(resolved, run))


def train(
    config: ConfigArgument, overrides: SetOption = None, run: RunOption = None, buffer: ConfigBufferOption = None
) -> None:
    """Train on the experiences of a run."""
    resolved = configuration(config, overrides, buffer)
    from rftcore.trainer import role

    raise typer.Exit(role.main(resolved, run))
