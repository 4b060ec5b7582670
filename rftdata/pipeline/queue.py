"""Work that explorers and pipeline workers claim: groups to roll out, evaluations to answer, sealed groups to decide on.

Claims are rows with a lease that the worker's heartbeat renews; SKIP LOCKED lets any number of workers claim at once.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from rftdata.failpoints import failpoint
from rftdata.pipeline.verdicts import Decision
from rftdata.postgres import notify
from rftdata.postgres.database import copy_rows, execute, storable
from rftdata.postgres.retry import ride_out

if TYPE_CHECKING:
    from rftdata.postgres.database import Database, Row
    from rftdata.training.attempt import Attempt

_MAX_LOST = 4
SET_ASIDE = "pipeline"
"""Stage name of experiences that were dropped before any stage saw them."""


@dataclass(frozen=True)
class ClaimedGroup:
    """A group to roll out, and its task."""

    group_id: int
    claim_token: int
    explore_step: int
    ordinal: int
    group_size: int
    task_id: int
    taskset: str
    task_key: str
    payload: dict[str, Any]


@dataclass
class SealedBatch:
    """Whole sealed groups as stages see them.

    Attributes:
        table: experiences of rollouts with outcome ok.
        group_ids: the groups claimed; one may have no such experience.
        label_cuts: the newest label of each group, or answer to a question about it, at the time of reading.
        failed: what stages never see: experiences of rollouts that failed or of groups that were screened out, decided here.
        first_key: least sort_key of the groups.
    """

    table: pa.Table
    group_ids: list[int]
    label_cuts: dict[int, int] = field(default_factory=dict)
    failed: list[Decision] = field(default_factory=list)
    first_key: int = 0

    def set_aside(self, reason: str) -> SealedBatch:
        """The same groups with every experience dropped before any stage sees it."""
        ids = zip(self.table["experience_id"].to_pylist(), self.table["group_id"].to_pylist(), strict=True)
        dropped = [Decision(key, group_id, False, SET_ASIDE, reason) for key, group_id in ids]
        return replace(self, table=self.table.slice(0, 0), failed=self.failed + dropped)


BATCH_SCHEMA = pa.schema(
    [
        ("experience_id", pa.int64()), ("group_id", pa.int64()), ("rollout_index", pa.int32()), ("turn_index", pa.int32()),
        ("task_id", pa.int64()), ("taskset", pa.string()), ("answer", pa.string()), ("prompt", pa.string()),
        ("response", pa.string()), ("reward", pa.float64()), ("reward_sampled", pa.float64()),
        ("num_prompt_tokens", pa.int32()), ("num_response_tokens", pa.int32()), ("finish_reason", pa.string()),
        ("metrics", pa.string()), ("source", pa.string()), ("messages", pa.string()), ("reward_parts", pa.string()),
        ("metadata", pa.string()), ("features", pa.string()), ("parent_id", pa.int64()), ("staleness", pa.int32()),
        ("labelled", pa.bool_()), ("reviews", pa.string()), ("group_size", pa.int32()),
    ]
)  # fmt: skip
"""What stages may read of an experience. `metrics`, `messages`, `reward_parts`, `metadata` and `features` (the last two of its task) are
JSON texts. `staleness`: trainer steps between the newest policy and that of its oldest token. `labelled`: whether a person or
judge changed the reward, of it or of what it was copied from. `reviews`: JSON object, the answer to every question asked about it:
waiting, pass or drop."""


def claim_groups(
    database: Database, run_id: int, worker_id: int, *, last_step: int, count: int, lease_s: float,
    held: Collection[int] | None = None,
) -> list[ClaimedGroup]:  # fmt: skip
    """Up to `count` planned groups of explorer steps up to `last_step`, in planning order.

    Args:
        held: every group this worker works on, by which a restart of the database can be ridden out: what a claim whose answer was
            lost took beside them is given back. None raises instead.
    """

    def claim() -> list[Row]:
        return database.fetch(
            "claim_groups", run_id=run_id, worker_id=worker_id, last_step=last_step, count=count, lease_s=lease_s
        )

    def give_back() -> None:
        database.run("release_groups_but", worker_id=worker_id, held=list(held or ()))

    rows = claim() if held is None else ride_out(claim, between=give_back)
    if rows:
        failpoint("explorer.claimed")
    names = ClaimedGroup.__dataclass_fields__
    return sorted(
        (ClaimedGroup(**{name: row[name] for name in names}) for row in rows), key=lambda g: (g.explore_step, g.ordinal)
    )


def release_groups(database: Database, worker_id: int) -> int:
    """Give back the groups this worker holds; the number of them."""
    return ride_out(lambda: database.run("release_groups_but", worker_id=worker_id, held=[]))


def claim_evaluation(database: Database, run_id: int, worker_id: int, *, lease_s: float) -> Row | None:
    """The next evaluation to answer, or None; a worker that claims one holds no other."""
    rows = ride_out(
        lambda: database.fetch("claim_evaluation", run_id=run_id, worker_id=worker_id, lease_s=lease_s),
        between=lambda: database.run("release_evaluations", run_id=run_id, worker_id=worker_id),
    )
    return rows[0] if rows else None


def finish_evaluation(
    database: Database, evaluation_id: int, worker_id: int, answers: Sequence[dict[str, Any]], seconds: float
) -> bool:
    """Store the answers and their mean; False when the claim passed to another worker.

    Answers with an error count with their reward of 0, and the evaluation's row says how many there are.
    """
    mean = sum(answer["reward"] for answer in answers) / max(len(answers), 1)
    errors = [answer["error"] for answer in answers if answer["error"]]
    error = f"{len(errors)} of {len(answers)} answers failed and count 0; the first: {errors[0]}" if errors else None

    def store() -> bool:
        with database.transaction() as connection:
            done = execute(
                connection, "finish_evaluation", evaluation_id=evaluation_id, worker_id=worker_id, num_tasks=len(answers),
                mean_reward=mean, seconds=seconds, error=storable(error),
            )  # fmt: skip
            if done:
                columns = [
                    ("evaluation_id", "int8"), ("task_id", "int8"), ("reward", "float8"), ("response", "text"),
                    ("num_response_tokens", "int4"), ("finish_reason", "text"), ("error", "text"),
                ]  # fmt: skip
                rows = ((evaluation_id, *(storable(answer[name]) for name, _ in columns[1:])) for answer in answers)
                copy_rows(connection, "rft.evaluation_answer", columns, rows)
        return bool(done)

    stored = ride_out(store)
    notify.notify(database, notify.RUN)
    return stored


def claim_sealed_groups(
    database: Database, run_id: int, worker_id: int, *, count: int, lease_s: float, from_key: int = 0,
    columns: Collection[str] = BATCH_SCHEMA.names, suspects: bool = False,
) -> SealedBatch | None:  # fmt: skip
    """Up to `count` sealed groups whose verdicts are due, first in first out from `from_key` on, or None.

    Only `columns` are read from the store and stand in the batch. With `suspects` a group comes first on which a worker died.

    A worker decides on one batch at a time: after a restart of the database, what it holds is of a claim whose answer was lost.
    """
    claimed: list[Row] = []
    # A group that a worker did not survive is claimed alone: when its turn comes, or when there is no other.
    for with_suspects in (suspects,) if suspects else (False, True):
        claim = functools.partial(
            database.fetch, "claim_sealed_groups", run_id=run_id, worker_id=worker_id, count=count, lease_s=lease_s, from_key=from_key,
            suspects=with_suspects,
        )  # fmt: skip
        claimed = ride_out(claim, between=lambda: give_back(database, run_id, worker_id))
        if claimed:
            break
    if not claimed:
        return None
    failpoint("pipeline.claimed")
    num_lost = max(row["num_lost"] for row in claimed)  # where it is not 0 there is one group, which may stand anywhere
    first_key = 0 if num_lost else min(row["sort_key"] for row in claimed)
    batch = read_groups(database, [row["group_id"] for row in claimed], columns, first_key)
    if num_lost < _MAX_LOST:
        return batch
    return batch.set_aside(f"{num_lost} pipeline workers ended while they decided on it")


def give_back(database: Database, run_id: int, worker_id: int) -> int:
    """Let others decide on what a pipeline worker holds; the number of groups."""
    return ride_out(lambda: database.run("release_items", run_id=run_id, worker_id=worker_id))


def read_groups(
    database: Database, group_ids: list[int], columns: Collection[str] = BATCH_SCHEMA.names, first_key: int = 0, *,
    as_sealed: bool = False,
) -> SealedBatch:  # fmt: skip
    """Whole groups as stages see them, with `columns` only.

    Args:
        as_sealed: their staleness when they were sealed, not now.
    """
    rows = database.fetch_by_index(
        "batch_of_groups", group_ids=group_ids, columns=list(columns), as_sealed=as_sealed
    )  # fmt: skip
    cuts = dict.fromkeys(group_ids, 0)
    good, failed = [], []
    for row in rows:
        cuts[row["group_id"]] = max(cuts[row["group_id"]], row.pop("label_cut"))
        outcome, error, screened = row.pop("outcome"), row.pop("error"), row.pop("screened")
        if screened is not None:  # whatever its rewards are by now: it lacks the rollouts that it was spared
            failed.append(Decision(row["experience_id"], row["group_id"], False, "screening", screened[:500]))
        elif outcome == "ok" or row["reward"] is not None:  # a person may have given a failed rollout a reward
            good.append(row)
        else:
            failed.append(
                Decision(
                    row["experience_id"], row["group_id"], False, "outcome", f"the rollout {outcome}: {error}"[:500]
                )
            )
    table = pa.Table.from_pylist(good, schema=pa.schema([f for f in BATCH_SCHEMA if f.name in columns]))
    return SealedBatch(table, group_ids, cuts, failed, first_key)


class SealedQueue:
    """Claims batches of sealed groups one after the other.

    While somebody holds a snapshot open, rows that were claimed and decided on cannot be cleaned away, and a claim that starts at
    the beginning passes over all of them. So it starts where the one before found its first group. That is a hint: groups that
    labels reopened, or that commit late, stand before that place, and once in `look_back_s` a claim starts at the beginning.

    Args:
        database, run_id, worker_id, lease_s, columns: as for `claim_sealed_groups`.
    """

    def __init__(
        self, database: Database, run_id: int, worker_id: int, *, lease_s: float, look_back_s: float = 1.0,
        columns: Collection[str] = BATCH_SCHEMA.names,
    ) -> None:  # fmt: skip
        self._database = database
        self._run_id, self._worker_id, self._lease_s = run_id, worker_id, lease_s
        self._look_back_s = look_back_s
        self._columns = columns
        self._from_key = 0
        self._looked_back = -math.inf

    def claim(self, count: int) -> SealedBatch | None:
        """Up to `count` groups, or None when none waits; one that stands before others may be found `look_back_s` later."""
        now = time.monotonic()
        looks_back = now - self._looked_back >= self._look_back_s
        if looks_back:
            self._from_key, self._looked_back = 0, now
            ride_out(lambda: self._database.run("end_waiting", run_id=self._run_id))
        batch = claim_sealed_groups(
            self._database, self._run_id, self._worker_id, count=count, lease_s=self._lease_s, from_key=self._from_key,
            columns=self._columns, suspects=looks_back,
        )  # fmt: skip
        if batch is not None:
            self._from_key = max(self._from_key, batch.first_key)
        return batch


def fail_evaluation(database: Database, evaluation_id: int, worker_id: int, error: str) -> None:
    """An evaluation that cannot be answered; nothing happens where its claim passed to another worker."""
    ride_out(
        lambda: database.run("fail_evaluation", evaluation_id=evaluation_id, worker_id=worker_id, error=storable(error))
    )
    notify.notify(database, notify.RUN)


def plan_evaluations(
    attempt: Attempt, *, policy_version_id: int, trainer_step: int, purpose: str, tasksets: Sequence[str],
    decodings: Sequence[str], uri: str, checksum: str,
) -> int:  # fmt: skip
    """Ask for evaluations of one policy version; those its history already has are not asked for again.

    Raises:
        FencedError: another attempt holds the run.
    """

    def plan() -> int:
        planned = 0
        with attempt.transaction() as connection:
            for taskset in tasksets:
                for decoding in decodings:
                    planned += execute(
                        connection, "plan_evaluation", run_id=attempt.run_id, policy_version_id=policy_version_id,
                        trainer_step=trainer_step, purpose=purpose, taskset=taskset, decoding=decoding, uri=uri, checksum=checksum,
                    )  # fmt: skip
        return planned

    planned = ride_out(plan)
    notify.notify(attempt.database, notify.POLICY)
    return planned
