"""Lineage: from an experience to steps, checkpoints and kin, from a checkpoint to experiences, and what pipelines found out."""

from __future__ import annotations

import datetime
from dataclasses import dataclass

from rftdata.errors import QueryError
from rftdata.postgres.database import Database, records
from rftdata.run import Run


@dataclass(frozen=True, kw_only=True)
class Use:
    """A step that used an experience, and the first checkpoint that contains it.

    Attributes:
        corrected_since: the reward was changed after the step used it.
    """

    run: str
    attempt_id: int
    trainer_step: int
    reward_used: float | None
    reward_now: float | None
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
    """What a stage or version of a pipeline found out or decided."""

    at: datetime.datetime
    version: str | None
    stage: str
    what: str
    detail: str | None


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where an experience was before it was imported."""

    buffer_id: str
    run: str
    experience_id: int


@dataclass(frozen=True, kw_only=True)
class Origin(Place):
    """Where an experience was imported from.

    Attributes:
        policy_step: trainer step of the policy that sampled it, where that is known.
        same_buffer: it was imported from this buffer.
    """

    policy_step: int | None
    same_buffer: bool


@dataclass(frozen=True, kw_only=True)
class Copy:
    """An experience of this buffer that was imported from another one of it."""

    run: str
    experience_id: int


@dataclass(frozen=True, kw_only=True)
class Kin:
    """What an experience was made of (`parent`), or what was made of it: an experience (`child`) or a task of the set `source` (`task`)."""

    kin: str
    experience_id: int | None
    source: str
    task_key: str | None


@dataclass(frozen=True, kw_only=True)
class PurgeRecord:
    """Who purged an experience, when and why."""

    purge_id: int
    author: str
    reason: str
    purged_at: datetime.datetime


def uses(database: Database, experience_id: int) -> list[Use]:
    """Every step that used an experience."""
    return records(Use, database.fetch("lineage_of_experience", experience_id=experience_id))


def trained_on(run: Run, step: int | None) -> list[TrainedOn]:
    """Every experience that the present history trained on up to the checkpoint of a step, in the order of use.

    Raises:
        QueryError: there is no such checkpoint.
    """
    steps = [row["trainer_step"] for row in run.database.fetch("lineage_steps", run_id=run.run_id)]
    if step not in steps:
        raise QueryError(
            f"run {run.name!r} has no checkpoint at this step", value=step, allowed=", ".join(map(str, steps)) or "none yet"
        )  # fmt: skip
    return records(TrainedOn, run.database.fetch("lineage_of_checkpoint", run_id=run.run_id, step=step))


def findings(database: Database, experience_id: int) -> list[Finding]:
    """What stages and versions of pipelines found out about an experience, in the order in which it happened."""
    return records(Finding, database.fetch("pipeline_of_experience", experience_id=experience_id))


def origin(database: Database, experience_id: int) -> Origin | None:
    """Where an experience was imported from; None for one that was stored in this buffer first."""
    rows = database.fetch("origins_of_experience", experience_id=experience_id)
    return records(Origin, rows)[0] if rows else None


def places(database: Database, experience_id: int) -> list[Place]:
    """Everywhere an experience was before it came here, the nearest first."""
    rows = database.fetch("origins_of_experience", experience_id=experience_id)
    return [place for row in rows for place in records(Place, [row, *reversed(row["earlier"])])]


def copies(database: Database, experience_id: int) -> list[Copy]:
    """Experiences of this buffer that were imported from an experience of it."""
    return records(Copy, database.fetch("copies_of_experience", experience_id=experience_id))


def kin(database: Database, experience_id: int) -> list[Kin]:
    """What an experience was made of, and what was made of it."""
    return records(Kin, database.fetch("kin_of_experience", experience_id=experience_id))


def purge_of(database: Database, experience_id: int) -> PurgeRecord | None:
    """The purge of an experience; None where it was not purged."""
    rows = database.fetch("purge_of_experience", experience_id=experience_id)
    return records(PurgeRecord, rows)[0] if rows else None
