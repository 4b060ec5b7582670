"""`rft explore|process|train`: one role in this process, which finds the others through the buffer.

The configuration is read before a role's packages are imported, so that a mistake is reported at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rftcore.cli.configuration import SetOption, configuration
from rftcore.cli.session import ConfigBufferOption
from rftcore.garbage import large_imports

ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's configuration file.")]
RunOption = Annotated[
    str | None,
    typer.Option(
        "--run", metavar="RUN", help="The run to join; by default the newest of the file's name that has not ended."
    ),
]


def explore(
    config: ConfigArgument, overrides: SetOption = None, run: RunOption = None, buffer: ConfigBufferOption = None
) -> None:
    """Sample rollouts for a run, beside roles that are started separately.

    It joins the newest run of the file's name that is at work or has not begun, and creates one if the buffer has none of that name.
    If every run of the name has ended, it creates no new one: `rft run CONFIG --resume` continues the last. While it waits, it reports
    for what, and which roles are not running.
    """
    settings = configuration(config, overrides, buffer)
    with large_imports():
        from rftcore.explorer import role
        from rftcore.launch.by_hand import join_by_hand

    raise typer.Exit(role.main(join_by_hand(settings, run, "explorer")))


def process(
    config: ConfigArgument, overrides: SetOption = None, run: RunOption = None, buffer: ConfigBufferOption = None
) -> None:
    """Decide on the experiences of a run as a further pipeline worker, beside roles that are started separately.

    It joins the newest run of the file's name that is at work or has not begun, and creates one if the buffer has none of that name.
    If every run of the name has ended, it creates no new one. While it waits, it reports for what, and which roles are not running.
    `rft pipeline` tries stages and compares their versions.
    """
    settings = configuration(config, overrides, buffer)
    with large_imports():
        from rftcore.launch.by_hand import join_by_hand
        from rftcore.pipeline import role

    raise typer.Exit(role.main(join_by_hand(settings, run, "pipeline")))


def train(
    config: ConfigArgument, overrides: SetOption = None, run: RunOption = None, buffer: ConfigBufferOption = None
) -> None:
    """Train on the experiences of a run, beside roles that are started separately.

    It joins the newest run of the file's name that is at work or has not begun, and creates one if the buffer has none of that name.
    If every run of the name has ended, it creates no new one. `--run RUN` continues an interrupted run from its last checkpoint.
    While it waits, it reports for what, and which roles are not running.
    """
    settings = configuration(config, overrides, buffer)
    if settings.only_evaluates:
        from rftcore.explorer import evaluation_run
        from rftcore.launch.by_hand import join_by_hand

        raise typer.Exit(evaluation_run.main(join_by_hand(settings, run, "trainer")))
    with large_imports():
        from rftcore.launch.by_hand import join_by_hand
        from rftcore.trainer import role

    raise typer.Exit(role.main(join_by_hand(settings, run, "trainer")))
