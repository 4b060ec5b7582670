"""Versions of a pipeline: their stages, their decisions on a run, their differences, and replays, which create new ones."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from psycopg.types.json import Jsonb

from rftdata.errors import ConfigError, ConflictError
from rftdata.pipeline.label_columns import check_kinds
from rftdata.pipeline.purged import without_purged_groups
from rftdata.pipeline.records import SealedBatch, Verdicts
from rftdata.pipeline.scores import EXPERIENCE_SCORES
from rftdata.pipeline.verdicts import insert_stage_runs, insert_verdicts
from rftdata.postgres.database import Database, execute, fetch, records
from rftdata.postgres.locks import Lock, holding
from rftdata.postgres.retry import ride_out
from rftdata.postgres.values import storable
from rftdata.run import Run


@dataclass(frozen=True, kw_only=True)
class PipelineVersion:
    """A version that decided on experiences of a run.

    Attributes:
        used: whether the run trains on its verdicts.
        num_kept, num_dropped: experiences, by its newest verdict on each.
        stages: name -> arguments of each stage; None if they were never stored.
    """

    pipeline_version: str
    used: bool
    num_kept: int
    num_dropped: int
    first_used_at: datetime.datetime | None
    stages: list[dict[str, Any]] | None


@dataclass(frozen=True, kw_only=True)
class Treatment:
    """Number of experiences with the result `before` of one version and `after` of another: the stage that drops them, or `kept`."""

    before: str
    after: str
    num_experiences: int
    num_rewards_changed: int
    mean_reward_change: float | None


@dataclass(frozen=True, kw_only=True)
class DifferentRow:
    """An experience that two versions treat differently. A reward is None for a version that drops it."""

    experience_id: int
    group_id: int
    reward: float | None
    before: str
    after: str
    reward_before: float | None
    reward_after: float | None


@dataclass(frozen=True)
class Difference:
    """The differences between two versions on a run.

    Attributes:
        counts: experiences by their result before and after, with changes of kept rewards.
        only_before, only_after: experiences on which only one version has decided.
        rows: some of the experiences that differ.
    """

    counts: list[Treatment]
    only_before: int
    only_after: int
    rows: list[DifferentRow]


def register_version(
    database: Database, name: str, digest: str, stages: Sequence[dict[str, Any]], label_kinds: Sequence[str] = ()
) -> None:
    """Store the stages of a version, and the kinds of labels that they read.

    Raises:
        ConfigError: the version already has other stages, or there is no such kind of label.
    """
    check_kinds(database, label_kinds)
    kinds = list(label_kinds)
    values = {"version": name, "digest": digest, "stages": Jsonb(storable(stages)), "label_kinds": kinds}
    (row,) = ride_out(lambda: database.fetch("register_pipeline", **values))
    if row["digest"] != digest:
        raise ConfigError(
            f"the pipeline version {name!r} already has other stages",
            value=digest,
            allowed=row["digest"],
            todo="choose another --version",
        )


def versions_of_run(run: Run) -> list[PipelineVersion]:
    """Versions that decided on experiences of a run, the first used first."""
    return records(PipelineVersion, run.database.fetch("pipeline_versions", run_id=run.run_id))


def compare_versions(run: Run, before: str, after: str, limit: int) -> Difference:
    """Compare two versions on a run.

    Raises:
        ConfigError: a version has not decided on any experience of the run.
    """
    names = {"run_id": run.run_id, "before": before, "after": after}
    pairs = run.database.fetch("compare_versions", **names, count=limit)
    for name, result in ((before, "before"), (after, "after")):
        if all(pair[result] is None for pair in pairs):
            known = [version.pipeline_version for version in versions_of_run(run)]
            raise ConfigError(
                f"no pipeline version of this name has decided on experiences of run {run.name!r}",
                value=name,
                allowed=", ".join(known) or "none yet",
                todo="create it with `rft pipeline replay CONFIG --version NAME`",
            )
    different = sorted(experience_id for pair in pairs for experience_id in pair.pop("different"))[:limit]
    return Difference(
        records(Treatment, [pair for pair in pairs if pair["before"] is not None and pair["after"] is not None]),
        sum(pair["num_experiences"] for pair in pairs if pair["after"] is None),
        sum(pair["num_experiences"] for pair in pairs if pair["before"] is None),
        records(DifferentRow, run.database.fetch("rows_that_differ", **names, experience_ids=different)),
    )


@contextlib.contextmanager
def replaying(run: Run, version: str) -> Iterator[None]:
    """Lock the replay of a version of a run, so that only this process replays it.

    Raises:
        ArchivedError: the run is archived.
        ConflictError: another process replays it.
    """
    run.refuse_archived("stages need its texts and arrays")
    with holding(run.database, Lock("replay", run.run_id, version)) as held_by:
        if held_by is not None:
            raise ConflictError(
                f"another process replays the version {version!r} of this run: {held_by}",
                todo="wait until it has finished",
            )
        yield


def groups_to_replay(run: Run, version: str, after: int, count: int) -> list[int]:
    """Return the next sealed groups with experiences that a version has not decided on since their last label or answer."""
    rows = run.database.fetch("groups_to_replay", run_id=run.run_id, version=version, after=after, count=count)
    return [row["group_id"] for row in rows]


def has_sealed_groups(run: Run) -> bool:
    """Return whether a run has a sealed group with experiences."""
    return bool(groups_to_replay(run, "", 0, 1))  # no version has this name, so all such groups are returned


def commit_replay(run: Run, worker_id: int, version: str, batch: SealedBatch, verdicts: Verdicts) -> int:
    """Store verdicts of a replay beside the existing ones; the groups stay where they are.

    Nothing of a group that was purged since it was read is stored; their number is returned. A group that the version has already decided on,
    with the same labels and answers or newer ones, is left out: another process of the replay, or an earlier try, stored its verdicts, and ended
    before it could report that.
    """
    return ride_out(lambda: _commit_replay(run, worker_id, version, batch, verdicts))


def _commit_replay(run: Run, worker_id: int, version: str, batch: SealedBatch, verdicts: Verdicts) -> int:
    with run.database.transaction() as connection:
        execute(connection, "lock_groups", group_ids=batch.group_ids)
        verdicts, num_purged = without_purged_groups(connection, batch, verdicts)
        cuts = [batch.label_cuts[group_id] for group_id in batch.group_ids]
        missing = [
            row["group_id"]
            for row in fetch(
                connection, "groups_without_verdict", version=version, group_ids=batch.group_ids, label_cuts=cuts
            )
        ]
        if not missing:
            return num_purged
        is_missing = pc.is_in(verdicts.decisions["group_id"], pa.array(missing, pa.int64()))
        EXPERIENCE_SCORES.store(connection, verdicts.scores)
        insert_verdicts(connection, version, batch.label_cuts, verdicts.decisions.filter(is_missing))
        insert_stage_runs(connection, version, verdicts.stages, run_id=run.run_id, worker_id=worker_id)
    return num_purged
