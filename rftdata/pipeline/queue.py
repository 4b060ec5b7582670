"""The queue of sealed groups that a pipeline decides on.

A claim is a row with a lease that the worker's heartbeat renews. SKIP LOCKED lets any number of workers claim at once.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Collection

import pyarrow as pa

from rftdata.failpoints import failpoint
from rftdata.pipeline.label_columns import label_kinds, newest_annotations, with_labels
from rftdata.pipeline.records import BATCH_SCHEMA, SealedBatch, concatenated, dropped
from rftdata.postgres.database import Database, Row
from rftdata.postgres.retry import ride_out
from rftdata.run import Run

_MAX_LOST = 4
_MAX_REASON = 500


def claim_sealed_groups(
    run: Run,
    worker_id: int,
    *,
    count: int,
    lease_s: float,
    from_key: int = 0,
    columns: Collection[str] = BATCH_SCHEMA.names,
    suspects: bool = False,
) -> SealedBatch | None:
    """Claim up to `count` sealed groups that need verdicts, first in first out from `from_key` on; None if there are none.

    Only `columns` are read from the store. With `suspects`, a group on which a worker crashed comes first.

    A worker decides on one batch at a time. After a restart of the database, anything it holds is from a claim whose answer was lost.
    """
    claimed: list[Row] = []
    # A group on which a worker crashed is claimed alone, when its turn comes or no other group is left.
    for with_suspects in (suspects,) if suspects else (False, True):
        claim = functools.partial(
            run.database.fetch,
            "claim_sealed_groups",
            run_id=run.run_id,
            worker_id=worker_id,
            count=count,
            lease_s=lease_s,
            from_key=from_key,
            suspects=with_suspects,
        )
        claimed = ride_out(claim, between=lambda: release_sealed_groups(run, worker_id))
        if claimed:
            break
    if not claimed:
        return None
    failpoint("pipeline.claimed")
    num_lost = max(row["num_lost"] for row in claimed)  # if it is not 0, there is one group, from anywhere in the queue
    first_key = 0 if num_lost else min(row["sort_key"] for row in claimed)
    batch = read_groups(run.database, [row["group_id"] for row in claimed], columns, first_key)
    if num_lost < _MAX_LOST:
        return batch
    return batch.set_aside(f"{num_lost} pipeline workers crashed while they decided on it")


def release_sealed_groups(run: Run, worker_id: int) -> int:
    """Release the groups that a pipeline worker holds; return their number."""
    return ride_out(lambda: run.database.run("release_items", run_id=run.run_id, worker_id=worker_id))


def sample_groups(run: Run, num_experiences: int, seed: int) -> list[int]:
    """Choose whole groups of a run with at least so many experiences together, or all; the choice depends on the seed.

    Raises:
        ArchivedError: the run is archived.
    """
    chosen: list[int] = []
    found = 0
    run.refuse_archived("stages need its texts and arrays")
    for row in run.database.fetch("sample_groups", run_id=run.run_id, seed=seed, count=num_experiences):
        if found >= num_experiences:
            break
        chosen.append(row["group_id"])
        found += row["num_experiences"]
    return chosen


def read_groups(
    database: Database,
    group_ids: list[int],
    columns: Collection[str] = BATCH_SCHEMA.names,
    first_key: int = 0,
    *,
    as_sealed: bool = False,
) -> SealedBatch:
    """Read whole groups as stages see them, with `columns` only.

    Args:
        columns: of `BATCH_SCHEMA`, and label columns.
        as_sealed: whether staleness is that at sealing instead of the current one.

    Raises:
        ConfigError: there is no kind of label for a label column.
    """
    kinds = label_kinds(columns)
    # Before the labels themselves: a cut that covers an annotation which a stage has not seen would hide it.
    newest = newest_annotations(database, group_ids, kinds)
    rows = database.fetch_by_index("batch_of_groups", group_ids=group_ids, columns=list(columns), as_sealed=as_sealed)
    cuts = dict.fromkeys(group_ids, 0) | newest
    good: list[Row] = []
    failed: dict[str, tuple[list[Row], list[str]]] = {"screening": ([], []), "baseline": ([], []), "outcome": ([], [])}
    for row in rows:
        cuts[row["group_id"]] = max(cuts[row["group_id"]], row.pop("label_cut"))
        outcome, error, screened = row.pop("outcome"), row.pop("error"), row.pop("screened")
        baseline_error = row.pop("baseline_error")
        if (
            screened is not None
        ):  # whatever its rewards are now, because the group lacks the rollouts that were not sampled
            stage, reason = "screening", screened
        elif baseline_error is not None:
            stage, reason = "baseline", baseline_error
        elif outcome == "ok" or row["reward"] is not None:  # a person may have given a failed rollout a reward
            good.append(row)
            continue
        else:
            stage, reason = "outcome", f"the rollout {outcome}: {error}"
        failed[stage][0].append(row)
        failed[stage][1].append(reason[:_MAX_REASON])
    table = pa.Table.from_pylist(good, schema=pa.schema([f for f in BATCH_SCHEMA if f.name in columns]))
    table = with_labels(database, table, kinds)
    ids = pa.schema([BATCH_SCHEMA.field("experience_id"), BATCH_SCHEMA.field("group_id")])
    decisions = [
        dropped(pa.Table.from_pylist(rows, schema=ids), stage, reasons) for stage, (rows, reasons) in failed.items()
    ]
    return SealedBatch(table, group_ids, cuts, concatenated(decisions), first_key)


class SealedQueue:
    """Claims batches of sealed groups one after the other.

    While another session holds a snapshot open, rows that were claimed and decided on cannot be removed, and a claim from
    the beginning reads all of them. A claim therefore starts where the previous one found its first group. That is a hint: groups that
    labels reopened, or that were sealed in another order than they were planned in, are before that place. So a claim starts at the
    beginning if no group waits behind the hint, and once in `look_back_s` seconds.

    Args:
        run, worker_id, lease_s, columns: as for `claim_sealed_groups`.
    """

    def __init__(
        self,
        run: Run,
        worker_id: int,
        *,
        lease_s: float,
        look_back_s: float = 1.0,
        columns: Collection[str] = BATCH_SCHEMA.names,
    ) -> None:
        self._run, self._worker_id, self._lease_s = run, worker_id, lease_s
        self._look_back_s = look_back_s
        self._columns = columns
        self._from_key = 0
        self._looked_back = -math.inf

    def claim(self, count: int) -> SealedBatch | None:
        """Claim up to `count` groups, None if none waits. A group before others may be found `look_back_s` seconds after them."""
        now = time.monotonic()
        looks_back = now - self._looked_back >= self._look_back_s
        if looks_back:
            self._from_key, self._looked_back = 0, now
            ride_out(lambda: self._run.database.run("end_waiting", run_id=self._run.run_id))
        batch = self._claim(count, suspects=looks_back)
        if batch is None and self._from_key > 0:
            self._from_key = 0
            batch = self._claim(count, suspects=False)
        if batch is not None:
            self._from_key = max(self._from_key, batch.first_key)
        return batch

    def _claim(self, count: int, *, suspects: bool) -> SealedBatch | None:
        return claim_sealed_groups(
            self._run,
            self._worker_id,
            count=count,
            lease_s=self._lease_s,
            from_key=self._from_key,
            columns=self._columns,
            suspects=suspects,
        )
