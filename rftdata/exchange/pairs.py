"""Preference pairs of a run: the groups from which they are built, their table, and their export.

Rewards are `rft.experience.reward` with every label up to one moment, the pairs' `label_cut`, without shaping by a pipeline. Answers that the chain of
the run dropped are neither compared nor exported, unless that is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from psycopg.types.json import Jsonb

from rftdata.attempts.dropped import DropCount, by_reason, drop_counts
from rftdata.attempts.label_cut import at_label_cut
from rftdata.errors import QueryError
from rftdata.files.durable import sync_path
from rftdata.limits import check_json
from rftdata.pipeline.records import BATCH_SCHEMA
from rftdata.postgres.database import Connection, Row, execute, fetch
from rftdata.run import Run

PairSource = Literal["rewards", "ranking", "edit"]
EXPORTS = (".jsonl", ".parquet")


@dataclass(frozen=True)
class PairBuild:
    """One transaction that builds pairs; created by `building`.

    Attributes:
        label_cut: newest label contained in the rewards.
        dry_run: whether pairs are only counted.
        include_dropped: whether answers that the chain of the run dropped are compared, too.
    """

    run: Run
    label_cut: int
    dry_run: bool
    include_dropped: bool
    _connection: Connection

    def groups(
        self, columns: Collection[str], page_groups: int
    ) -> Iterator[tuple[pa.Table, int, list[tuple[str, str]]]]:
        """Yield up to `page_groups` finished groups at a time, as pipeline stages see them, with `columns`; also their number, and the stage and the
        reason of each experience that is left out. A rollout with a dropped row is left out whole.
        """
        after = 0
        page = {"run_id": self.run.run_id, "limit": page_groups}
        while rows := fetch(self._connection, "finished_groups", after_id=after, **page):
            group_ids = [row["group_id"] for row in rows]
            after = group_ids[-1]
            batch = fetch(
                self._connection, "batch_of_groups", group_ids=group_ids, columns=list(columns), as_sealed=False
            )
            table = pa.Table.from_pylist(batch, schema=BATCH_SCHEMA)
            drops = [] if self.include_dropped else fetch(self._connection, "dropped_of_groups", group_ids=group_ids)
            yield _without(table, drops), len(group_ids), [(row["stage"], row["reason"]) for row in drops]

    def blind_kinds(self) -> tuple[list[str], int]:
        """Return the blind kinds, and how many pairs their rankings and edits compare."""
        kinds = [row["kind"] for row in fetch(self._connection, "blind_kinds")]
        (compared,) = fetch(self._connection, "pairs_of_kinds", run_id=self.run.run_id, kinds=kinds)
        return kinds, compared["num"]

    def preferred(self, without_kinds: Sequence[str] = ()) -> tuple[list[Row], list[tuple[str, str]]]:
        """Return the pairs that people's rankings and edits compare, and the stage and the reason of each experience that was left out.

        Args:
            without_kinds: kinds that neither give pairs nor count for the agreement.
        """
        rows = fetch(self._connection, "preferred_pairs", run_id=self.run.run_id, without_kinds=list(without_kinds))
        if self.include_dropped:
            return rows, []
        ids = sorted({row[side] for row in rows for side in ("chosen_id", "rejected_id")})
        drops = fetch(self._connection, "left_out_among", experience_ids=ids)
        dropped = {row["experience_id"] for row in drops}
        kept = [row for row in rows if not {row["chosen_id"], row["rejected_id"]} & dropped]
        return kept, [(row["stage"], row["reason"]) for row in drops]

    def store(
        self,
        pairs: Sequence[tuple[int, int]],
        *,
        author: str,
        builder: dict[str, Any],
        source: PairSource = "rewards",
    ) -> int:
        """Store pairs of (chosen, rejected) experience ids that are not stored yet; return their number.

        Args:
            builder: the settings that found them.
        """
        check_json("the settings of the pair builder", builder)
        chosen, rejected = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        ids = {"chosen_ids": chosen, "rejected_ids": rejected, "source": source}
        if self.dry_run:
            return len(fetch(self._connection, "new_pairs", **ids))
        return execute(
            self._connection, "insert_pairs", author=author, builder=Jsonb(builder), label_cut=self.label_cut, **ids
        )


def _without(table: pa.Table, drops: Sequence[Row]) -> pa.Table:
    """Return a batch without the rollouts that have a dropped row."""
    if not drops:
        return table
    dropped = {row["experience_id"] for row in drops}
    keys = table.select(["experience_id", "group_id", "rollout_index"]).to_pylist()
    rollouts = {(key["group_id"], key["rollout_index"]) for key in keys if key["experience_id"] in dropped}
    return table.filter(pa.array([(key["group_id"], key["rollout_index"]) not in rollouts for key in keys], pa.bool_()))


@contextmanager
def building(run: Run, *, dry_run: bool = False, include_dropped: bool = False) -> Iterator[PairBuild]:
    """Build pairs of a run; all are stored at the end, or none.

    Raises:
        ArchivedError: the run is archived.
        ConflictError: another session's labels stay uncommitted, or the same pairs are being built elsewhere.
    """
    run.refuse_archived("pairs are built from its texts")
    with at_label_cut(run.database, read_only=dry_run) as (connection, label_cut):
        yield PairBuild(run, label_cut, dry_run, include_dropped, connection)


@dataclass(frozen=True)
class ExportedPairs:
    """The result of an export.

    Attributes:
        num_pairs: pairs written.
        dropped: answers of other pairs, which the chain of the run dropped, by reason.
    """

    num_pairs: int
    dropped: tuple[DropCount, ...]


def export_pairs(run: Run, file: Path, *, include_dropped: bool = False) -> ExportedPairs:
    """Write the pairs of a run that its rewards still support to a .jsonl or .parquet file.

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
    dropped: dict[int, tuple[str, str]] = {}
    if not include_dropped:
        drops = run.database.fetch("dropped_of_pairs", pair_ids=[row["pair_id"] for row in rows])
        dropped = {row["experience_id"]: (row["stage"], row["reason"]) for row in drops}
        rows = [row for row in rows if not {row["chosen_id"], row["rejected_id"]} & dropped.keys()]
    counts = drop_counts(dropped.values())
    if not rows and counts:
        raise QueryError(
            f"every preference pair of the run {run.name!r} has an answer that its chain dropped: {by_reason(counts)}",
            todo="build others, or export these: --include-dropped",
        )
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
    return ExportedPairs(len(rows), counts)
