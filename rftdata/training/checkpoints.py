"""Committed checkpoints: which there are, and which of them must stay."""

from __future__ import annotations

from dataclasses import dataclass

from rftdata.postgres.database import records
from rftdata.run import Run


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A committed checkpoint; its fields are columns of `rft.checkpoint`, which are described there."""

    checkpoint_id: int
    run_id: int
    trainer_step: int
    uri: str
    policy_version_id: int | None


@dataclass(frozen=True, kw_only=True)
class KeptCheckpoint(Checkpoint):
    """A checkpoint whose files are there.

    Attributes:
        waits: a validation of its step is still to be answered.
        needed: it belongs to another run, or another run began with it.
    """

    waits: bool
    needed: bool


def committed_folders(run: Run) -> set[str]:
    """Folders of all checkpoints of a run, on any history, whose files must stay."""
    return {row["uri"] for row in run.database.fetch("committed_checkpoints", run_id=run.run_id)}


def kept_checkpoints(run: Run, attempt_id: int) -> list[KeptCheckpoint]:
    """Checkpoints on the history of an attempt whose files are there, newest first."""
    return records(KeptCheckpoint, run.database.fetch("kept_checkpoints", attempt_id=attempt_id))
