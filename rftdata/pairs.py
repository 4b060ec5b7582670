"""Preference pairs of a run: the groups from which they are built, their table, and their export.

Rewards are `rft.experience.reward` with every label up to one moment, the pairs' `label_cut`, without shaping by a pipeline.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from psycopg.types.json import Jsonb

from rftdata.durable_files import sync_path
from rftdata.errors import QueryError
from rftdata.limits import check_json
from rftdata.pipeline.records import BATCH_SCHEMA
from rftdata.postgres.database import Connection, execute, fetch
from rftdata.run import Run
from rftdata.training.stored_selection import at_label_cut

EXPORTS = (".jsonl", ".parquet")


@dataclass(frozen=True)
class PairBuild:
    """The building of pairs in one transaction; created by `building`.

    Attributes:
        label_cut: newest label contained in the rewards.
        dry_run: whether pairs are only counted.
    """

    run: Run
    label_cut: int
    dry_run: bool
    _connection: Connection

    def groups(self, columns: Collection[str], page_groups: int) -> Iterator[tuple[pa.Table, int]]:
        """Yield up to `page_groups` finished groups at a time, as pipeline stages see them, with `columns`, and their number."""
        after = 0
        page = {"run_id": self.run.run_id, "limit": page_groups}
        while rows := fetch(self._connection, "finished_groups", after_id=after, **page):
            group_ids = [row["group_id"] for row in rows]
            after = group_ids[-1]
            batch = fetch(
                self._connection, "batch_of_groups", group_ids=group_ids, columns=list(columns), as_sealed=False
            )
            yield pa.Table.from_pylist(batch, schema=BATCH_SCHEMA), len(group_ids)

    def store(self, pairs: Sequence[tuple[int, int]], *, author: str, builder: dict[str, Any]) -> int:
        """Store pairs of (chosen, rejected) experience ids that are not stored yet; return their number.

        Args:
            builder: the settings that found them.
        """
        check_json("the settings of the pair builder", builder)
        ids = {"chosen_ids": [chosen for chosen, _ in pairs], "rejected_ids": [rejected for _, rejected in pairs]}
        if self.dry_run:
            return len(fetch(self._connection, "new_pairs", **ids))
        return execute(
            self._connection, "insert_pairs", author=author, builder=Jsonb(builder), label_cut=self.label_cut, **ids
        )


@contextmanager
def building(run: Run, *, dry_run: bool = False) -> Iterator[PairBuild]:
    """Build pairs of a run; all are stored at the end, or none.

    Raises:
        ArchivedError: the run is archived.
        ConflictError: another session's labels stay uncommitted, or the same pairs are being built elsewhere.
    """
    run.refuse_archived("pairs are built from its texts")
    with at_label_cut(run.database, read_only=dry_run) as (connection, label_cut):
        yield PairBuild(run, label_cut, dry_run, connection)


def export_pairs(run: Run, file: Path) -> int:
    """Write the pairs of a run that its rewards still support to a .jsonl or .parquet file; return their number.

    The columns `prompt`, `chosen` and `rejected` are those that other DPO trainers read; the others give the origin.

    Raises:
        ArchivedError: the run is archived.
        QueryError: the suffix is unknown, or there is no pair to write; no file is created.
    """
    if file.suffix not in EXPORTS:
        raise QueryError(
            "unknown kind of file for pairs",
            value=file.name,
            allowed=" or ".join(EXPORTS),
            todo="name such a file",
        )
    run.refuse_archived("its pairs have no texts to export")
    rows = run.database.fetch("pairs_that_stand", run_id=run.run_id)
    if not rows:
        raise QueryError(
            f"the run {run.name!r} has no preference pair that its rewards support",
            todo=f"build some: rft pairs build {run.name}",
        )
    draft = file.with_name(f".{file.name}.draft")
    if file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), draft)
    else:
        draft.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    sync_path(draft)
    draft.replace(file)
    return len(rows)
