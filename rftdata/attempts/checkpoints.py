"""Committed checkpoints: which ones exist, and which of them must be kept."""

from __future__ import annotations

from dataclasses import dataclass

from rftdata.postgres.database import records
from rftdata.run import Run


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A committed checkpoint; its fields are columns of `rft.checkpoint`."""

    checkpoint_id: int
    run_id: int
    trainer_step: int
    uri: str
    policy_version_id: int | None


@dataclass(frozen=True, kw_only=True)
class KeptCheckpoint(Checkpoint):
    """A checkpoint whose files exist.

    Attributes:
        waits: whether a validation of its step is still unanswered.
        needed: whether it belongs to another run, or another run began with it.
    """

    waits: bool
    needed: bool


def committed_folders(run: Run) -> set[str]:
    """Return the folders of all checkpoints of a run, on any history, whose files must be kept."""
    return {row["uri"] for row in run.database.fetch("committed_checkpoints", run_id=run.run_id)}


def kept_checkpoints(run: Run, attempt_id: int) -> list[KeptCheckpoint]:
    """Return the checkpoints on the history of an attempt whose files exist, newest first."""
    return records(KeptCheckpoint, run.database.fetch("kept_checkpoints", attempt_id=attempt_id))
