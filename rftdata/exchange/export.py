"""Export of groups to a file.

Everything is read in one snapshot: a concurrent label is in the file with all its changes or not at all. Purged experiences are left
out and counted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from rftdata.buffer import Buffer
from rftdata.errors import ArchivedError, QueryError
from rftdata.exchange.columns import BASE_ARRAYS, SCHEMA, Row, packed
from rftdata.exchange.formats import check_format, written
from rftdata.exchange.prefetch import prefetched
from rftdata.maintenance.conditions import chosen
from rftdata.pipeline.purged import PURGED
from rftdata.postgres.database import Connection, fetch
from rftdata.segments.codec import SCHEMA as BASE
from rftdata.segments.codec import SHAPE_SUFFIX, ColumnReader

_CHUNK_GROUPS = 64
_NOT_WRITTEN = ("segment_id", "segment_row", "purged")
_LABEL_FIELDS = [field.name for field in SCHEMA.field("labels").type.value_type]


@dataclass(frozen=True)
class ExportResult:
    """The contents of an exported file.

    Attributes:
        num_purged: experiences left out because they were purged.
    """

    path: str
    num_groups: int
    num_rollouts: int
    num_experiences: int
    num_purged: int


def export(
    buffer: Buffer, path: Path, *, runs: Sequence[str] = (), where: str | None = None, whole_groups: bool = False
) -> ExportResult:
    """Write experiences with everything they belong to, in the format of the suffix of `path`.

    Args:
        runs: names or ids; empty for all runs.
        where: a condition over `rft.v_experience`; other experiences are left out, as are rollouts without experiences.
        whole_groups: whether to write the whole group of each chosen experience.

    Raises:
        ArchivedError: one of the runs is archived.
        QueryError: a run does not exist, the condition is invalid, there is nothing to write, or the file exists or cannot be written.
    """
    check_format(path)
    run_ids = [buffer.find_run(name).run_id for name in runs] or None
    _refuse_archived(buffer, run_ids)
    buffer_id = str(buffer.database.fetch("buffer_id")[0]["buffer_id"])
    with buffer.database.reading() as connection:
        groups, wanted = _selected(connection, where, run_ids, whole_groups)
        if not groups:
            raise QueryError(
                "no experience is chosen, so there is nothing to export", value=where, todo="widen the condition"
            )
        # Look up the rows of each piece by their keys, also before the server knows how many there are; the selection may join by hashing.
        fetch(connection, "plan_by_index")
        with contextlib.closing(prefetched(_fetched(connection, groups, wanted))) as chunks, written(path) as write:
            counts = {"num_groups": 0, "num_rollouts": 0, "num_experiences": 0, "num_purged": 0}
            for kept, labels in chunks:
                _mark_purged(buffer, kept)
                counts["num_purged"] += sum(row["purged"] for row in kept)
                stored = [row for row in kept if not row["purged"]]
                write(list(_complete(buffer, stored, labels, buffer_id)))
                counts["num_groups"] += len({row["group_id"] for row in stored})
                counts["num_rollouts"] += len({(row["group_id"], row["rollout_index"]) for row in stored})
                counts["num_experiences"] += sum(row["experience_id"] is not None for row in stored)
            if not counts["num_rollouts"]:
                raise QueryError("everything chosen was purged, so there is nothing to export", value=where)
    return ExportResult(str(path), **counts)


def _refuse_archived(buffer: Buffer, run_ids: list[int] | None) -> None:
    for row in buffer.database.fetch("archived_among", run_ids=run_ids):
        raise ArchivedError(
            f"the run {row['run']!r} is archived: its texts and arrays are in Parquet files in {buffer.archives.folder}",
            todo=f"use these, name other runs with --run, or bring it back first: `rft restore-run {row['run']}`",
        )


def _selected(
    connection: Connection, where: str | None, run_ids: list[int] | None, whole_groups: bool
) -> tuple[list[int], set[int] | None]:
    """Return the groups in order, and the chosen experiences (None for all, and for rollouts without any)."""
    everything = [int(row["group_id"]) for row in fetch(connection, "export_groups", run_ids=run_ids)]
    if where is None:
        return everything, None
    pairs = chosen(connection, where, run_ids)
    groups = {group_id for group_id, _ in pairs}
    return [i for i in everything if i in groups], None if whole_groups else {i for _, i in pairs}


def _fetched(
    connection: Connection, groups: list[int], wanted: set[int] | None
) -> Iterator[tuple[list[Row], dict[int, list[Row]]]]:
    """Yield the chosen rows of some groups after the other, and the labels by experience."""
    for start in range(0, len(groups), _CHUNK_GROUPS):
        rows = fetch(connection, "export_rows", group_ids=groups[start : start + _CHUNK_GROUPS])
        kept = [row for row in rows if wanted is None or row["experience_id"] in wanted]
        labels: dict[int, list[Row]] = {row["experience_id"]: [] for row in kept if row["experience_id"] is not None}
        for label in fetch(connection, "export_labels", experience_ids=list(labels)):
            labels[label["experience_id"]].append({name: label[name] for name in _LABEL_FIELDS})
        annotations: dict[int, list[str]] = {}
        for row in fetch(connection, "export_annotations", group_ids=groups[start : start + _CHUNK_GROUPS]):
            annotations.setdefault(row["experience_id"], []).append(row["annotation"])
        comments: dict[int, list[str]] = {}
        for row in fetch(connection, "export_comments", group_ids=groups[start : start + _CHUNK_GROUPS]):
            comments.setdefault(row["experience_id"], []).append(row["comment"])
        for row in kept:
            for name, found in (("annotations", annotations), ("comments", comments)):
                if row["experience_id"] in found:
                    row[name] = f"[{', '.join(found[row['experience_id']])}]"
        yield kept, labels


def _mark_purged(buffer: Buffer, rows: list[Row]) -> None:
    """Mark rows whose arrays were purged after the snapshot was taken, which still has their texts; and remove what their groups quote of them."""
    stored = [row for row in rows if row["segment_id"] is not None and not row["purged"]]
    groups = set()
    for i in buffer.reader.purged([(row["segment_id"], row["segment_row"]) for row in stored]):
        stored[i]["purged"] = True
        groups.add(stored[i]["group_id"])
    for row in rows:
        if row["group_id"] in groups:
            row |= {
                "baseline": None,
                "tries": None,
                "annotations": None,
                "comments": None,
                "error": row["error"] and PURGED,
            }


def _complete(buffer: Buffer, rows: list[Row], labels: dict[int, list[Row]], buffer_id: str) -> Iterator[Row]:
    """Convert rows of the query to rows of the file: with labels and arrays, in the order of columns."""
    arrays = _Arrays(
        buffer.reader.batches(sorted({row["segment_id"] for row in rows if row["segment_id"] is not None}))
    )
    columns = dict.fromkeys(SCHEMA.names) | {"buffer_id": buffer_id}
    for row in rows:
        whole: Row = {**columns, **row}
        if row["experience_id"] is not None:
            whole |= arrays.of(row["segment_id"], row["segment_row"])
            whole |= {"labels": labels[row["experience_id"]], "earlier": row["earlier"] or "[]"}
        else:
            whole["earlier"] = None
        for name in _NOT_WRITTEN:
            del whole[name]
        yield whole


class _Arrays:
    """Reads all arrays of a row, whatever columns its segment has."""

    def __init__(self, batches: dict[int, pa.RecordBatch]) -> None:
        self._spans = {i: batch.column("policy_spans") for i, batch in batches.items()}
        self._columns = {
            i: {
                name: ColumnReader(batch, name)
                for name in batch.schema.names
                if name != "policy_spans" and not name.endswith(SHAPE_SUFFIX)
            }
            for i, batch in batches.items()
        }
        self._further = {
            i: sorted((name, reader) for name, reader in columns.items() if name not in BASE.names)
            for i, columns in self._columns.items()
        }

    def of(self, segment_id: int, row: int) -> dict[str, Any]:
        columns = self._columns[segment_id]
        further = ((name, reader.row(row)) for name, reader in self._further[segment_id])
        return {
            **{name: columns[name].flat(row) for name in BASE_ARRAYS},
            "policy_spans": self._spans[segment_id][row].as_py(),
            "arrays": [packed(array, name) for name, array in further if array is not None],
        }
