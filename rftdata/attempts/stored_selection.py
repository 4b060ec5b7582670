"""Stored selections: the rows that a run trains on, chosen by a query only once, when the run is created.

`select` runs the query read-only and records its result: ids, a label cut, and a hash over ids, checksums of the token
arrays and rewards at that cut. `Buffer.create_run` stores it with the run. `verify` computes the hash again before an attempt
starts. Sampled data cannot change, and later labels are after the cut, so a resumed run trains on the same rows.

What the chain of its run dropped is left out, unless the selection includes it: an experience, a pair with a dropped side, and of a group the dropped
experiences. Which those are is stored with the run, so that later verdicts change no batch.

A second column `priority` of the query makes the draws random: the probability of each row is proportional to its weight (its priority to the power of an
exponent), and the run ends after as many draws as without weights.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rftdata.attempts.dropped import DropCount, by_reason, drop_counts
from rftdata.attempts.label_cut import at_label_cut
from rftdata.attempts.selection_query import KINDS, checked_ids, run_query, weights_of
from rftdata.errors import QueryError, SelectionChangedError
from rftdata.postgres.database import Connection, Database, Row, execute, fetch, queries

_ITEMS_AT_ONCE = 2048
_FACTS = {"experience": "selected_experiences", "pair": "selected_pairs", "group": "selected_groups"}


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The result of a selection query.

    Attributes:
        sql: the query.
        kind: `experience`, `pair` or `group`.
        item_ids: ids of the experiences, pairs or groups, ascending.
        content_hash: SHA-256, hexadecimal, of their identifying content.
        label_cut: newest label that counts; None if rewards are not pinned and not part of the hash.
        weights: of the items, to which the probabilities of their draws are proportional; None if each is drawn once in an epoch.
        left_out: of selected groups, the experiences that are not trained on, by group.
        num_without: items of the query's result that are not selected, because they were dropped or keep too few rollouts.
        dropped: the experiences that a chain had dropped, by reason; they are left out.
        epochs: how often each item is drawn; with weights, on average.
    """

    sql: str
    kind: str
    item_ids: tuple[int, ...]
    content_hash: str
    label_cut: int | None
    weights: tuple[float, ...] | None = None
    left_out: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    num_without: int = 0
    dropped: tuple[DropCount, ...] = ()
    epochs: int = 1

    def describe_dropped(self) -> str | None:
        """Describe what is left out, and how to include it; None if nothing is."""
        if not self.dropped:
            return None
        parts = [f"{self.num_without:,} {self.kind}s"] if self.num_without else []
        if self.left_out:
            parts.append(f"{sum(map(len, self.left_out.values())):,} experiences of {'others' if parts else 'groups'}")
        return (
            f"sampling.source leaves out {' and '.join(parts)}, since chains had dropped experiences: {by_reason(self.dropped)}; "
            "sampling.source.include_dropped: true trains on them"
        )


def num_steps(num_rows: int, batch_size: int, epochs: int) -> int:
    """Return the trainer steps of a selection. Batches cross the ends of epochs, and contain no row twice."""
    return -(-num_rows * epochs // min(batch_size, num_rows))


def select(
    database: Database,
    sql: str,
    *,
    pin_labels: bool = True,
    priority_exponent: float | None = None,
    include_dropped: bool = False,
    min_rollouts: int = 1,
    epochs: int = 1,
) -> Selection:
    """Run a query and record the rows that it selects.

    Args:
        priority_exponent: the query must have a second column `priority`, and weights are priorities to this power; None: it must have none.
        include_dropped: select what chains dropped, too.
        min_rollouts: groups that keep fewer rollouts are not selected.
        epochs: how often each row is drawn; with weights, on average.

    Raises:
        QueryError: it is not a single read-only SELECT of exactly `experience_id`, `pair_id` or `group_id` (and `priority`), or its
            result is empty (or was dropped), or contains NULL, duplicates, unknown ids, rows without token arrays, a priority that is not a number of at
            least 0, or a pair of answers to different prompts.
        ConflictError: see `at_label_cut`.
    """
    with at_label_cut(database) as (connection, cut):
        column, rows = run_query(connection, sql.strip().rstrip(";"), with_priority=priority_exponent is not None)
        item_ids = checked_ids(column, [row[0] for row in rows])
        dropped = _Dropped() if include_dropped else _dropped(connection, KINDS[column], item_ids, min_rollouts)
        num_selected = len(item_ids)
        item_ids = tuple(item_id for item_id in item_ids if item_id not in dropped.items)
        if not item_ids:
            raise QueryError(
                f"chains had dropped all {num_selected:,} rows that sampling.source selects: {by_reason(drop_counts(dropped.reasons))}",
                todo="select others, or set sampling.source.include_dropped: true",
            )
        left_out = {item_id: ids for item_id, ids in dropped.experiences.items() if item_id not in dropped.items}
        weights = None
        if priority_exponent is not None:
            weights = weights_of(connection, item_ids, dict(rows), priority_exponent)
        label_cut = cut if pin_labels else None
        content_hash, problems = _hash(connection, KINDS[column], item_ids, label_cut, weights, left_out)
    if problems:
        item, problem = problems[0]
        raise QueryError(
            f"{len(problems)} of the {len(item_ids)} rows that sampling.source selects cannot be trained on: "
            f"{KINDS[column]} {item} {problem}",
            todo="exclude such rows from the query",
        )
    return Selection(
        sql=sql,
        kind=KINDS[column],
        item_ids=item_ids,
        content_hash=content_hash,
        label_cut=label_cut,
        weights=weights,
        left_out=left_out,
        num_without=len(dropped.items),
        dropped=drop_counts(dropped.reasons),
        epochs=epochs,
    )


def small_groups(database: Database, selected: Selection, num_rollouts: int) -> dict[int, int]:
    """Return the selected groups with experiences of fewer rollouts than a number, and how many each has."""
    rows = database.fetch(
        "small_groups", item_ids=list(selected.item_ids), num_rollouts=num_rollouts, left_out=_flat(selected.left_out)
    )
    return {row["item_id"]: row["num_rollouts"] for row in rows}


def selected_rewards(database: Database, selected: Selection) -> Iterator[dict[int, float | None]]:
    """Yield the ids of all experiences of a selection with the rewards to train with, those of some thousand items at a time."""
    for ids in _pages(selected.item_ids):
        left_out = _flat({item_id: selected.left_out.get(item_id, ()) for item_id in ids})
        rows = database.fetch(
            "experiences_of_items",
            item_ids=list(ids),
            kind=selected.kind,
            label_cut=selected.label_cut,
            left_out=left_out,
        )
        yield {row["experience_id"]: row["reward"] for row in rows}


def store(connection: Connection, run_id: int, selection: Selection) -> Row:
    """Store a selection as the queue of a new run; return the run's row."""
    row = fetch(
        connection,
        "store_selection",
        run_id=run_id,
        sql=selection.sql,
        kind=selection.kind,
        num_rows=len(selection.item_ids),
        content_hash=selection.content_hash,
        epochs=selection.epochs,
        label_cut=selection.label_cut,
        weighted=selection.weights is not None,
    )[0]
    weights = selection.weights or [1.0] * len(selection.item_ids)
    execute(connection, "queue_selection", run_id=run_id, item_ids=list(selection.item_ids), weights=list(weights))
    execute(connection, "queue_left_out", run_id=run_id, experience_ids=_flat(selection.left_out))
    execute(connection, "analyze_worklist")
    return row


def verify(connection: Connection, run: Row) -> None:
    """Check that a run's stored selection is unchanged; a run without a selection needs no check.

    Raises:
        SelectionChangedError: it has changed; the message names removed rows.
    """
    if run["source_kind"] is None:
        return
    rows = fetch(connection, "queued_selection", run_id=run["run_id"], kind=run["source_kind"])
    item_ids = [row["item_id"] for row in rows]
    weights = [row["draw_weight"] for row in rows] if run["source_weighted"] else None
    left_out: dict[int, list[int]] = defaultdict(list)
    for row in fetch(connection, "queued_left_out", run_id=run["run_id"]):
        left_out[row["group_id"]].append(row["experience_id"])
    content_hash, problems = _hash(connection, run["source_kind"], item_ids, run["label_cut"], weights, left_out)
    if content_hash == run["source_hash"]:
        return
    gone = f"; {run['source_kind']} {problems[0][0]} {problems[0][1]}" if problems else ""
    raise SelectionChangedError(
        f"the selection of the run {run['name']!r} is no longer what it was when the run was made: {len(item_ids)} of "
        f"{run['source_rows']} rows, hash {content_hash[:12]} instead of {run['source_hash'][:12]}{gone}",
        todo="start a new run with the same sampling.source; this one cannot repeat its batches",
    )


@dataclass(frozen=True)
class _Dropped:
    """What chains dropped of selected items.

    Attributes:
        items: those that are not selected for it.
        experiences: the dropped ones of each item.
        reasons: stage and reason, once for each dropped experience.
    """

    items: set[int] = field(default_factory=set)
    experiences: dict[int, tuple[int, ...]] = field(default_factory=dict)
    reasons: list[tuple[str, str]] = field(default_factory=list)


def _dropped(connection: Connection, kind: str, item_ids: Sequence[int], min_rollouts: int) -> _Dropped:
    dropped = _Dropped()
    seen: set[int] = set()
    for ids in _pages(item_ids):
        for row in fetch(connection, "dropped_of_items", item_ids=list(ids), kind=kind):
            item_id = row["item_id"]
            if kind != "group" or row["num_rollouts"] < min_rollouts:
                dropped.items.add(item_id)
            if kind == "group":
                dropped.experiences[item_id] = tuple(row["experience_ids"])
            drops = zip(row["experience_ids"], row["stages"], row["reasons"], strict=True)
            fresh = [drop for drop in drops if drop[0] not in seen]  # an experience may be in several pairs
            seen.update(drop[0] for drop in fresh)
            dropped.reasons.extend((stage, reason) for _, stage, reason in fresh)
    return dropped


def _pages(item_ids: Sequence[int]) -> Iterator[Sequence[int]]:
    for first in range(0, len(item_ids), _ITEMS_AT_ONCE):
        yield item_ids[first : first + _ITEMS_AT_ONCE]


def _flat(left_out: Mapping[int, Sequence[int]]) -> list[int]:
    return [experience_id for ids in left_out.values() for experience_id in ids]


def _hash(
    connection: Connection,
    kind: str,
    item_ids: Sequence[int],
    label_cut: int | None,
    weights: Sequence[float] | None,
    left_out: Mapping[int, Sequence[int]],
) -> tuple[str, list[tuple[int, str]]]:
    """Return the SHA-256 of a selection, and the problem of each unusable item."""
    digest = hashlib.sha256(kind.encode())
    if weights is not None:
        digest.update(np.asarray(weights, "<f8").tobytes())
    problems = []
    with connection.cursor() as cursor:
        facts = {"item_ids": list(item_ids), "label_cut": label_cut, "left_out": _flat(left_out)}
        for row in cursor.stream(queries()[_FACTS[kind]], facts):
            digest.update(b"\n" + row["line"].encode())
            if row["problem"]:
                problems.append((row["item_id"], row["problem"]))
    return digest.hexdigest(), problems
