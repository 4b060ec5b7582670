"""Preference pairs of a run: built by the operator `pair_builder` from the rewards as they stand, and written to files.

The rewards are `rft.experience.reward`, with every label up to one moment (the pairs' `label_cut`) and not shaped by a
pipeline; experiences that the run's pipeline dropped are compared too: what is too long or too easy for one algorithm may be
just the contrast that another needs. A correction therefore changes what the next build finds; pairs stored before are never
changed, and `rft.v_pair` says which of them still stand.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from psycopg.types.json import Jsonb

from operators.experience.pair_builder import Pair, PairBuilder
from rftdata.buffer import Buffer
from rftdata.durable_files import sync_path
from rftdata.errors import QueryError
from rftdata.pipeline.records import BATCH_SCHEMA
from rftdata.postgres.database import Connection, execute, fetch
from rftdata.run import Run
from rftdata.training.stored_selection import at_label_cut

EXPORTS = (".jsonl", ".parquet")


@dataclass(frozen=True)
class BuiltPairs:
    """What one build found.

    Attributes:
        num_groups: groups looked at; num_groups_with_pairs: those that gave any.
        num_pairs: pairs found; num_new: those not stored before.
        chosen_longer, rejected_longer: share of pairs in which that answer is the longer one; the rest are of equal length.
        chosen_tokens, rejected_tokens: mean response length.
        label_cut: newest label that the rewards contain.
        stored: False for a dry run.
    """

    run: str
    num_groups: int
    num_groups_with_pairs: int
    num_pairs: int
    num_new: int
    chosen_longer: float
    rejected_longer: float
    chosen_tokens: float
    rejected_tokens: float
    label_cut: int
    stored: bool


def build_pairs(
    buffer: Buffer, run: Run, builder: PairBuilder, *, author: str, dry_run: bool = False, page_groups: int = 512
) -> BuiltPairs:
    """Build the pairs of a run's finished groups and store those that are new, all or none of them.

    Args:
        page_groups: so many groups are in memory at a time.

    Raises:
        ConflictError: somebody's labels stay uncommitted, or the same pairs are being built elsewhere.
    """
    groups, num_new, found = 0, 0, []
    with at_label_cut(buffer.database, read_only=dry_run) as (connection, label_cut):
        settings = builder.config.model_dump(mode="json")
        for table, num_groups in _pages(connection, run.run_id, page_groups):
            pairs = builder.pairs(table)
            ids = {"chosen_ids": [p.chosen_id for p in pairs], "rejected_ids": [p.rejected_id for p in pairs]}
            num_new += (
                len(fetch(connection, "new_pairs", **ids))
                if dry_run
                else execute(
                    connection, "insert_pairs", author=author, builder=Jsonb(settings), label_cut=label_cut, **ids
                )
            )
            groups += num_groups
            found += pairs
    return _summary(run.name, groups, found, num_new, label_cut, stored=not dry_run)


def export_pairs(buffer: Buffer, run: Run, file: Path) -> int:
    """Write the pairs of a run that stand to a .jsonl or .parquet file; how many.

    The columns `prompt`, `chosen` and `rejected` are what other DPO trainers read; the others say where they come from.

    Raises:
        QueryError: another ending, or no pair to write; no file is made.
    """
    if file.suffix not in EXPORTS:
        raise QueryError(
            "pairs are written to a file of a known kind",
            value=file.name,
            allowed=" or ".join(EXPORTS),
            todo="name such a file",
        )
    rows = buffer.database.fetch("pairs_that_stand", run_id=run.run_id)
    if not rows:
        raise QueryError(
            f"the run {run.name!r} has no preference pair that stands",
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


def _pages(connection: Connection, run_id: int, num_groups: int) -> Iterator[tuple[pa.Table, int]]:
    """Batches of whole groups, as pipeline stages see them, and how many groups are in each."""
    after = 0
    while rows := fetch(connection, "finished_groups", run_id=run_id, after_id=after, limit=num_groups):
        group_ids = [row["group_id"] for row in rows]
        after = group_ids[-1]
        batch = fetch(
            connection, "batch_of_groups", group_ids=group_ids, columns=list(PairBuilder.reads), as_sealed=False
        )
        yield pa.Table.from_pylist(batch, schema=BATCH_SCHEMA), len(group_ids)


def _summary(run: str, num_groups: int, pairs: list[Pair], num_new: int, label_cut: int, *, stored: bool) -> BuiltPairs:
    count = max(1, len(pairs))
    return BuiltPairs(
        run, num_groups, len({pair.group_id for pair in pairs}), len(pairs), num_new,
        chosen_longer=sum(pair.chosen_tokens > pair.rejected_tokens for pair in pairs) / count,
        rejected_longer=sum(pair.chosen_tokens < pair.rejected_tokens for pair in pairs) / count,
        chosen_tokens=sum(pair.chosen_tokens for pair in pairs) / count,
        rejected_tokens=sum(pair.rejected_tokens for pair in pairs) / count,
        label_cut=label_cut, stored=stored,
    )  # fmt: skip
