"""What the groups of a write are made from: tasks that they name, parents of their experiences, and the policies that sampled them.

A purge of a source may commit while the groups are on their way. It waits for a transaction that holds the source, and a transaction that
waited for a purge refuses the groups.
"""

from __future__ import annotations

from dataclasses import dataclass

from rftdata.errors import PurgedError, RftError
from rftdata.postgres.database import Connection, Cursor, send
from rftdata.postgres.values import storable
from rftdata.writing.write_batch import WriteBatch


@dataclass(frozen=True)
class SourceChecks:
    """Answers of the server about the sources of a batch; None for a question that the batch does not raise.

    Attributes:
        parent_ids: parents of experiences; those of imports are looked up by their origins instead.
        parents: those that exist; purged: those that were purged.
        tasks: tasks named by unplanned groups, if they are stored.
        version_ids: policy versions that sampled; those of imports are of another buffer. versions: those that exist.
    """

    parent_ids: list[int]
    version_ids: list[int]
    parents: Cursor | None
    purged: Cursor | None
    tasks: Cursor | None
    versions: Cursor | None


def send_source_checks(connection: Connection, batch: WriteBatch) -> SourceChecks:
    """Lock the sources of a batch and ask about them, in a pipeline."""
    own = [s for s in batch.sequences if s.origin is None]
    parents = sorted({int(s.parent_id) for s in own if s.parent_id is not None})
    greedy = [g.baseline.policy_version_min for g in batch.groups if g.baseline is not None and g.origin is None]
    versions = sorted(
        {int(v) for s in own for _, v in s.policy_spans} | {int(version) for version in greedy if version is not None}
    )
    named = [(g.taskset, g.task_key) for g in batch.groups if g.group_id is None]
    return SourceChecks(
        parents,
        versions,
        send(connection, "lock_parents", experience_ids=parents) if parents else None,
        send(connection, "purged_among", experience_ids=parents) if parents else None,
        send(
            connection,
            "lock_named_tasks",
            tasksets=[storable(taskset) for taskset, _ in named],
            task_keys=[storable(task_key) for _, task_key in named],
        )
        if named
        else None,
        send(connection, "known_policy_versions", policy_version_ids=versions) if versions else None,
    )


def check_sources(checks: SourceChecks) -> None:
    """Refuse groups whose sources do not exist or were purged.

    Raises:
        PurgedError: a source was purged.
        RftError: a parent or a policy version does not exist.
    """
    for unknown in _missing(checks.parent_ids, checks.parents):
        raise RftError(
            "the parent_id of a sequence names an experience that does not exist",
            value=unknown,
            allowed="an experience_id of this buffer, or None",
            todo="write the parent first, or leave parent_id out",
        )
    for unknown in _missing(checks.version_ids, checks.versions):
        raise RftError(
            "the policy_spans of a sequence name a policy version that does not exist",
            value=unknown,
            allowed="a policy_version_id of this buffer (rft.policy_version); no spans if no policy of this buffer sampled",
            todo="use what Attempt.publish returned, or leave policy_spans out",
        )
    for row in checks.purged.fetchall() if checks.purged is not None else ():
        raise PurgedError(
            f"experience {row['experience_id']}, from which this group was made, was purged",
            todo="discard the group: it may contain the purged text",
        )
    for row in checks.tasks.fetchall() if checks.tasks is not None else ():
        if row["purged"]:
            raise PurgedError(
                f"the task {row['task_key']!r} of {row['taskset']!r} was purged",
                todo="discard the group, or give its task another key if it has nothing of the purged one",
            )


def _missing(ids: list[int], existing: Cursor | None) -> list[int]:
    """Return the ids that are not in the answer, whose rows have one column each."""
    if existing is None:
        return []
    return sorted(set(ids) - {value for row in existing.fetchall() for value in row.values()})
