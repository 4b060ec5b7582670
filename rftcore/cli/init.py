"""`rft init`: begin with a small complete project."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def init(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="grpo, sft, dpo, workflow, environment or stages.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new or empty folder.")],
) -> None:
    """Write a project that runs as it is: configuration, tasks, reward, and a README on what to change.

    grpo: reinforcement learning with a reward of your own. sft: imitate chats. dpo: preference pairs from the rewards of a run. workflow: a tool that
    the model calls in a loop. stages: imitate, then reinforce, in one file.
    """
    from rftcore.projects import KINDS, write_project
    from rftdata.config_errors import did_you_mean
    from rftdata.errors import ConfigError

    if kind not in KINDS:
        raise ConfigError(
            "unknown kind of project",
            value=kind,
            allowed=", ".join(KINDS),
            todo=did_you_mean(kind, KINDS, "name one of them"),
        )
    files = write_project(kind, folder)
    print(f"{folder}: {KINDS[kind]}\n  {', '.join(file.name for file in files)}\nnext: cd {folder} && cat README.md")
