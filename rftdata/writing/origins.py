"""The origins of imported groups and experiences, stored in the writer's transaction.

A group is imported into a run once: `rft.group_origin` has one row per run, origin buffer and origin group. Labels are stored with their
experiences; the importer assigns them batch ids of this buffer.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence

from rftdata.experience import Group
from rftdata.experience import Sequence as Experience
from rftdata.origin import GroupOrigin, LabelRecord, SequenceOrigin
from rftdata.postgres.database import Connection, copy_rows, execute, fetch
from rftdata.postgres.values import jsonb_bytes, storable

_GROUP = (
    ("group_id", "int8"),
    ("run_id", "int8"),
    ("buffer_id", "uuid"),
    ("origin_run_id", "int8"),
    ("origin_run", "text"),
    ("origin_group_id", "int8"),
    ("explore_step", "int4"),
    ("group_size", "int4"),
)
_EXPERIENCE = (
    ("experience_id", "int8"),
    ("origin_experience_id", "int8"),
    ("origin_parent_id", "int8"),
    ("source", "text"),
    ("policy_version_min", "int8"),
    ("policy_version_max", "int8"),
    ("policy_step", "int4"),
    ("sampled_at", "timestamptz"),
    ("earlier", "bytea"),
)
_LABEL = (
    ("experience_id", "int8"),
    ("turn", "int4"),
    ("old_value", "float8"),
    ("new_value", "float8"),
    ("author", "text"),
    ("session_user_name", "text"),
    ("source", "text"),
    ("reason", "text"),
    ("label_batch_id", "int8"),
    ("final", "bool"),
    ("labelled_at", "timestamptz"),
)
_EDIT = (("experience_id", "int8"), ("is_copy", "bool"), ("origin", "bytea"))


def parents_of(
    connection: Connection, run_id: int, experiences: Sequence[tuple[int, Group, Experience]]
) -> dict[str, dict[int, int]]:
    """Return ids in this buffer of the parents of imported experiences, by origin buffer and id there.

    A parent is in the same write or in an earlier one, which has committed: a run has one import at a time, and its writer stores one
    batch after the other. So all parents of a batch take one look-up, and no group waits for another.

    Args:
        experiences: ids in this buffer, groups and experiences of one write.
    """
    parents: dict[str, dict[int, int]] = {}
    missing: dict[str, set[int]] = {}
    for i, group, e in experiences:
        if group.origin is not None and e.origin is not None:
            parents.setdefault(group.origin.buffer_id, {})[e.origin.origin_experience_id] = i
    for _, group, e in experiences:
        if group.origin is not None and e.origin is not None and e.origin.origin_parent_id is not None:
            buffer_id = group.origin.buffer_id
            if e.origin.origin_parent_id not in parents[buffer_id]:
                missing.setdefault(buffer_id, set()).add(e.origin.origin_parent_id)
    for buffer_id, ids in missing.items():
        rows = fetch(connection, "imported_experiences", run_id=run_id, buffer_id=buffer_id, origin_ids=sorted(ids))
        parents[buffer_id] |= {row["origin_experience_id"]: row["experience_id"] for row in rows}
    return parents


def parent_id(group: Group, experience: Experience, parents: dict[str, dict[int, int]]) -> int | None:
    """Return the id in this buffer of an experience's parent; None without one.

    Args:
        parents: as `parents_of` returned them.
    """
    if experience.origin is None or experience.origin.origin_parent_id is None or group.origin is None:
        return experience.parent_id
    known = parents.get(group.origin.buffer_id, {})
    return known.get(experience.origin.origin_parent_id, experience.parent_id)


def store(
    connection: Connection,
    run_id: int,
    groups: Sequence[tuple[int, GroupOrigin]],
    experiences: Sequence[tuple[int, Experience]],
) -> None:
    """Write the origins of groups and experiences, their labels, annotations and comments; times have a time zone.

    Args:
        groups: ids in this buffer, and the origins of the groups.
        experiences: ids in this buffer; experiences without an origin are skipped.
    """
    if not groups:
        return
    with_origin = [(i, e.origin) for i, e in experiences if e.origin is not None]
    copy_rows(connection, "rft.group_origin", _GROUP, (_group_row(i, run_id, origin) for i, origin in groups))
    copy_rows(connection, "rft.experience_origin", _EXPERIENCE, (_experience_row(i, o) for i, o in with_origin))
    labels = [(i, label) for i, origin in with_origin for label in origin.labels]
    if labels:
        copy_rows(connection, "rft.label", _LABEL, (_label_row(i, label) for i, label in labels))
    annotations = [{**a, "experience_id": i} for i, origin in with_origin for a in origin.annotations]
    if annotations:
        execute(connection, "import_annotations", annotations=json.dumps(annotations))
    comments = [{**c, "experience_id": i} for i, origin in with_origin for c in origin.comments]
    if comments:
        execute(connection, "import_comments", comments=json.dumps(comments))
    edits = [(i, True, jsonb_bytes(origin.edit)) for i, origin in with_origin if origin.edit is not None]
    if edits:
        copy_rows(connection, "rft.edited_response", _EDIT, iter(edits))


def _group_row(group_id: int, run_id: int, origin: GroupOrigin) -> tuple[object, ...]:
    return (
        group_id,
        run_id,
        uuid.UUID(origin.buffer_id),
        origin.origin_run_id,
        storable(origin.origin_run),
        origin.origin_group_id,
        origin.explore_step,
        origin.group_size,
    )


def _experience_row(experience_id: int, origin: SequenceOrigin) -> tuple[object, ...]:
    return (
        experience_id,
        origin.origin_experience_id,
        origin.origin_parent_id,
        origin.source,
        origin.policy_version_min,
        origin.policy_version_max,
        origin.policy_step,
        origin.sampled_at,
        jsonb_bytes(origin.earlier),
    )


def _label_row(experience_id: int, label: LabelRecord) -> tuple[object, ...]:
    return (
        experience_id,
        label.turn,
        label.old_value,
        label.new_value,
        storable(label.author),
        storable(label.session_user_name),
        label.source,
        storable(label.reason),
        label.label_batch_id,
        label.final,
        label.labelled_at,
    )
