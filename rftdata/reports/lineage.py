"""Lineage: from an experience to steps, checkpoints and related rows, from a checkpoint to experiences; and pipeline results."""

from __future__ import annotations

import datetime
from dataclasses import dataclass

from rftdata.attempts.run_models import RunModel
from rftdata.errors import QueryError
from rftdata.postgres.database import Database, records
from rftdata.run import Run


@dataclass(frozen=True, kw_only=True)
class Use:
    """A step that used an experience, and the first checkpoint that contains it.

    Attributes:
        turn_rewards_used: rewards of its turns; None if they were those that were sampled.
        turn_rewards_now: current rewards of its turns; None without any.
        corrected_since: whether the reward, or that of a turn, was changed after the step used it.
    """

    run: str
    attempt_id: int
    trainer_step: int
    reward_used: float | None
    reward_now: float | None
    turn_rewards_used: list[float] | None
    turn_rewards_now: list[float] | None
    corrected_since: bool
    checkpoint_step: int | None
    checkpoint_uri: str | None


@dataclass(frozen=True, kw_only=True)
class TrainedOn:
    """An experience that a checkpoint was trained on; see `Use`."""

    trainer_step: int
    experience_id: int
    reward_used: float | None
    reward_now: float | None
    corrected_since: bool


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A result of a stage or version of a pipeline."""

    at: datetime.datetime
    version: str | None
    stage: str
    what: str
    detail: str | None


@dataclass(frozen=True, kw_only=True)
class EarlierExperience:
    """An experience as another buffer or run had it before its import."""

    buffer_id: str
    run: str
    experience_id: int


@dataclass(frozen=True, kw_only=True)
class Origin(EarlierExperience):
    """The experience from which one of this buffer was imported.

    Attributes:
        policy_step: trainer step of the policy that sampled it; None if unknown.
        same_buffer: whether it was imported from this buffer.
    """

    policy_step: int | None
    same_buffer: bool


@dataclass(frozen=True, kw_only=True)
class Copy:
    """An experience of this buffer that was imported from another experience of it."""

    run: str
    experience_id: int


@dataclass(frozen=True, kw_only=True)
class RelatedRow:
    """A row related to an experience.

    Attributes:
        relation: `parent`: the experience from which it was created; `child`: an experience created from it; `task`: a task created from it.
        source: of a task.
    """

    relation: str
    experience_id: int | None
    source: str
    task_key: str | None


@dataclass(frozen=True, kw_only=True)
class PurgeRecord:
    """Author, time and reason of a purge."""

    purge_id: int
    author: str
    reason: str
    purged_at: datetime.datetime


def uses(database: Database, experience_id: int) -> list[Use]:
    """Return every step that used an experience."""
    return records(Use, database.fetch("lineage_of_experience", experience_id=experience_id))


def trained_on(run: Run, step: int | None) -> list[TrainedOn]:
    """Return all experiences that the current history trained on up to the checkpoint of a step, in order of use.

    Raises:
        QueryError: the checkpoint does not exist.
    """
    steps = [row["trainer_step"] for row in run.database.fetch("lineage_steps", run_id=run.run_id)]
    if step not in steps:
        raise QueryError(
            f"run {run.name!r} has no checkpoint at this step",
            value=step,
            allowed=", ".join(map(str, steps)) or "none yet",
        )
    return records(TrainedOn, run.database.fetch("lineage_of_checkpoint", run_id=run.run_id, step=step))


def findings(database: Database, experience_id: int) -> list[Finding]:
    """Return the results of stages and pipeline versions for an experience, in order of time."""
    return records(Finding, database.fetch("pipeline_of_experience", experience_id=experience_id))


def origin(database: Database, experience_id: int) -> Origin | None:
    """Return what an experience was imported from; None for one first stored in this buffer."""
    rows = database.fetch("origins_of_experience", experience_id=experience_id)
    return records(Origin, rows)[0] if rows else None


def earlier_experiences(database: Database, experience_id: int) -> list[EarlierExperience]:
    """Return the experiences that an imported one was before, nearest first."""
    rows = database.fetch("origins_of_experience", experience_id=experience_id)
    return [earlier for row in rows for earlier in records(EarlierExperience, [row, *reversed(row["earlier"])])]


def copies(database: Database, experience_id: int) -> list[Copy]:
    """Return experiences of this buffer that were imported from an experience of it."""
    return records(Copy, database.fetch("copies_of_experience", experience_id=experience_id))


def related_rows(database: Database, experience_id: int) -> list[RelatedRow]:
    """Return what an experience was created from, and what was created from it."""
    return records(RelatedRow, database.fetch("related_to_experience", experience_id=experience_id))


def reward_models(database: Database, experience_id: int) -> list[RunModel]:
    """Return the reward models of the run of an experience, if its reward has a part of such a model."""
    return records(RunModel, database.fetch("reward_models_of_experience", experience_id=experience_id))


def purge_of(database: Database, experience_id: int) -> PurgeRecord | None:
    """Return the purge of an experience; None if it was not purged."""
    rows = database.fetch("purge_of_experience", experience_id=experience_id)
    return records(PurgeRecord, rows)[0] if rows else None


def archived_with(database: Database, experience_id: int) -> str | None:
    """Return the name of the archived run of an experience; None if the run is not archived."""
    rows = database.fetch("archived_experiences_among", experience_ids=[experience_id])
    return str(rows[0]["run"]) if rows else None
