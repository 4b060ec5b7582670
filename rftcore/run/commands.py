"""Commands that messages recommend."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from rftdata.run import Run
from rftdata.uri import redacted


def buffer_option(location: str) -> str:
    """Return the option that commands in this folder need to find the buffer; empty if they find it without."""
    default = os.environ.get("RFT_BUFFER") or "buffer"
    default_location = redacted(default) if "://" in default else str(Path(default).resolve())
    return "" if location == default_location else f" --buffer {shlex.quote(location)}"


def resume_command(location: str, run: Run) -> str:
    """Return the command that continues a run, for use in this folder."""
    return f"rft run --resume {run.name}{buffer_option(location)}"


def what_decides(run: Run, num_groups: int, option: str) -> str | None:
    """Return how undecided groups of a run that has ended or was imported are decided on; None while the run continues.

    Args:
        option: the option with which the command finds the buffer, see `buffer_option`.
    """
    groups = "1 undecided group" if num_groups == 1 else f"{num_groups} undecided groups"
    as_they_are = "exports and stored selections (sampling.source) read the rewards as they are"
    if not num_groups or not (run.was_imported or run.has_ended):
        return None
    if run.was_imported:
        return f"{groups}: the run was imported and has no pipeline; {as_they_are}"
    steps = f" --set steps={2 * run.planned_steps}" if run.status == "finished" else ""
    command = f"rft run --resume {run.name}{steps}{option}"
    return f"{groups}: the run has ended, so no process decides on them; `{command}` decides first and then continues; {as_they_are}"
