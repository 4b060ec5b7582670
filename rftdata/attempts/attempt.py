"""One attempt of a run's trainer: batches, published weights, recorded steps and checkpoints, written under its hold on the run.

A new attempt continues from the last checkpoint of the previous one. Draws made after that checkpoint belong to a history that ended,
and their groups can be drawn again.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from psycopg.types.json import Jsonb

from rftdata.attempts import takeover
from rftdata.attempts.batch import Batch
from rftdata.attempts.checkpoints import Checkpoint
from rftdata.attempts.draws import Draws
from rftdata.attempts.hold import Hold
from rftdata.attempts.role_baselines import RoleBaseline
from rftdata.attempts.sampling import SamplingConfig, checked_formula
from rftdata.errors import QueryError
from rftdata.failpoints import failpoint
from rftdata.limits import MAX_COUNT, check_integer
from rftdata.postgres import notify
from rftdata.postgres.database import Row, execute, fetch, records
from rftdata.postgres.retry import ride_out
from rftdata.postgres.values import storable
from rftdata.run import Run
from rftdata.segments.reader import SegmentReader
from rftdata.workers.live_workers import record_exited_workers

ARRAYS = ("token_ids", "loss_mask", "behavior_logprobs")


class Attempt(Hold):
    """An attempt that holds its run; created by `Buffer.attempt`.

    Its methods retry across a restart of the database (`rftdata.postgres.retry`), and check for an earlier write before they write again.

    Attributes:
        run: the run, as it was before.
        attempt_id: its key.
        checkpoint: the checkpoint from which it continues; None if it starts from the initial weights.
        start_step: trainer steps already done on its history.
    """

    def __init__(
        self,
        run: Run,
        reader: SegmentReader,
        attempt_id: int,
        checkpoint: Checkpoint | None,
        lease_s: float | None,
        max_refill: int,
        receipt: uuid.UUID | None = None,
    ) -> None:
        super().__init__(run, attempt_id, lease_s=lease_s, receipt=receipt)
        self.checkpoint = checkpoint
        self.start_step = checkpoint.trainer_step if checkpoint else 0
        # Ids that this object received; a newer one is from a try whose answer was lost.
        self._newest_version = self._newest_checkpoint = 0
        self._draws = Draws(self, reader, max_refill)

    @classmethod
    def start(
        cls,
        run: Run,
        reader: SegmentReader,
        lease_s: float,
        sampling: SamplingConfig,
        max_refill: int,
        tasksets: Sequence[str],
    ) -> Attempt:
        """Take the run: see `Buffer.attempt`."""
        formula = checked_formula(run.database, sampling.priority.formula)
        policy = Jsonb(sampling.policy(tasksets, formula))
        record_exited_workers(run)
        receipt = uuid.uuid4()
        try:
            attempt_id, checkpoint = ride_out(lambda: takeover.take(run, receipt, lease_s, policy))
            failpoint("trainer.started")
            notify.notify(run.database, notify.RUN)
            return cls(run, reader, attempt_id, _checkpoint(checkpoint), lease_s, max_refill, receipt)
        except BaseException:
            takeover.give_up(run, receipt)
            raise

    @classmethod
    def join(cls, run: Run, reader: SegmentReader, attempt_id: int, max_refill: int) -> Attempt:
        """Join an attempt of another process as a further rank: see `Buffer.join_attempt`."""

        def read() -> tuple[int | None, Row | None]:
            with run.database.transaction() as connection:
                holder = fetch(connection, "lock_run", run_id=run.run_id)[0]["current_attempt_id"]
                checkpoints = fetch(connection, "last_checkpoint", attempt_id=attempt_id, step=None)
                return holder, checkpoints[0] if checkpoints else None

        holder, checkpoint = ride_out(read)
        attempt = cls(run, reader, attempt_id, _checkpoint(checkpoint), None, max_refill)
        if holder != attempt_id:
            attempt.close()
            raise attempt.fenced_error()
        return attempt

    def draw(
        self,
        step: int,
        num_groups: int,
        columns: Sequence[str] = ARRAYS,
        *,
        share: tuple[int, int] | None = None,
        timeout_s: float | None = None,
        stop: Callable[[], bool] = lambda: False,
        waiting: Callable[[str | None], None] = lambda reason: None,
    ) -> Batch | None:
        """Draw the batch of a trainer step: whole ready groups by the run's sampling policy, claimed in one transaction.

        A run that trains on a stored selection draws the next rows of it instead: experiences, or whole pairs. It never waits, and
        the batch is short when the selection ends.

        Waits for groups. If no more can come for this step (every group is decided and the refill is used up), the batch is
        short, and its `short_reason` gives the reason; it may be empty. A step that this attempt has already drawn is not drawn again:
        every process of the attempt gets the same batch.

        If only answers of people can complete the step, ready groups of later explorer steps take the places, and the
        waiting groups are drawn for a later step.

        Args:
            step: trainer step, from 1; it draws groups of explorer steps before it.
            num_groups: number of groups, or of rows of a stored selection.
            columns: token arrays to read.
            share: (rank, world size) of a data-parallel trainer. The rank that asks first draws the step's groups. Every rank gets
                its part of them (`Batch.share`) and reads no other rank's arrays.
            timeout_s: longest wait; None for no limit.
            stop: called between waits; true ends the wait.
            waiting: called before each wait, with the groups whose review is awaited if only reviews are missing, otherwise with None.

        A group with arrays that cannot be read is dropped whole, with a verdict of the stage `storage` and a `closed_reason`
        that name the segment. Another group is drawn in its place.

        Returns:
            The batch, or None if the wait ended without one.

        Raises:
            FencedError: another attempt holds the run.
            SegmentCorruptError: arrays of a stored selection cannot be read.
            PurgedError: a row of a stored selection was purged.
            BufferUnavailableError: the folder of the segments cannot be read.
        """
        check_integer("the trainer step of a draw", step, (1, MAX_COUNT))
        check_integer("the number of groups of a draw", num_groups, (0, MAX_COUNT))
        _refuse_policy_spans(columns)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not stop():
            batch, reason = self._draws.draw(step, num_groups, columns)
            if batch is not None:
                return batch if share is None else batch.share(*share)
            if deadline is not None and time.monotonic() > deadline:
                return None
            waiting(reason)
            self.wait()
        return None

    def draw_ahead(self, step: int, num_groups: int, columns: Sequence[str] = ARRAYS) -> Batch | None:
        """Draw a step's batch while the step before it is trained: the full batch if it is ready now, otherwise None.

        It neither waits nor decides that no more groups will come. It may be called from another thread than the other methods. Ask
        `is_current` before the batch is trained on, and `release` it if it is not used.

        Raises:
            FencedError, SegmentCorruptError, PurgedError, BufferUnavailableError: see `draw`. Rows may have been drawn: call `release_step`.
        """
        return self._draws.draw(step, num_groups, columns, ahead=True)[0]

    def is_current(self, batch: Batch) -> bool:
        """Return whether a draw of the batch's groups would give the same rows and rewards now.

        False after a label or an answer to a review, a verdict, a purge, or another pipeline of the run. If so, release the batch and
        draw again.

        Raises:
            FencedError: another attempt holds the run.
        """
        return self._draws.are_current(batch.step)

    def release(self, batch: Batch) -> None:
        """Release an unused batch: its draws never took place. See `release_step`."""
        self.release_step(batch.step)

    def release_step(self, step: int) -> None:
        """Release what was drawn for a step and not trained on.

        Raises:
            FencedError: another attempt holds the run.
            RftError: the step is recorded as done, or a checkpoint contains it.
        """
        ride_out(lambda: self._draws.release(step))
        notify.notify(self.run.database, notify.READY)

    def set_priorities(self, priorities: Mapping[int, float]) -> int:
        """Set priorities of groups (by group_id), for orders by priority and for formulas that use `priority`.

        Returns:
            The number of these groups in this run; others are skipped.

        Raises:
            FencedError: another attempt holds the run.
            QueryError: a priority is negative or not a finite number.
        """
        for group_id, priority in priorities.items():
            _check_priority(group_id, priority)

        def write() -> int:
            with self.transaction() as connection:
                (row,) = fetch(
                    connection,
                    "set_priorities",
                    run_id=self.run.run_id,
                    item_ids=list(priorities),
                    priorities=[float(value) for value in priorities.values()],
                )
            return int(row["num_known"])

        return ride_out(write)

    def publish(self, step: int, *, method: str, uri: str, num_bytes: int, checksum: str) -> int:
        """Announce the weights after `step` and wake the explorers; return the policy_version_id."""
        check_integer("the trainer step of published weights", step, (0, MAX_COUNT))
        weights = {"method": method, "uri": uri, "num_bytes": num_bytes, "checksum": checksum}
        row = self._write_once(
            step, "insert_policy_version", weights, "policy_version_after", after=self._newest_version
        )
        self._newest_version = int(row["policy_version_id"])
        failpoint("trainer.published")
        notify.notify(self.run.database, notify.POLICY)
        return self._newest_version

    def record_step(
        self,
        step: int,
        batch: Batch,
        *,
        wait_seconds: float,
        train_seconds: float,
        publish_seconds: float,
        metrics: dict[str, float],
        baselines: Sequence[RoleBaseline] = (),
    ) -> None:
        """Record that a step is done; a batch without experiences is a skipped step.

        Args:
            baselines: those of roles that the step advanced; stored in the same transaction.
        """
        keys = {"attempt_id": self.attempt_id, "trainer_step": step}
        result = {
            "outcome": "trained" if len(batch) else "skipped",
            "reason": batch.short_reason,
            "num_groups": batch.num_groups,
            "num_experiences": len(batch),
            "num_tokens": int(batch.lengths.sum()),
            "wait_seconds": wait_seconds,
            "train_seconds": train_seconds,
            "publish_seconds": publish_seconds,
            "metrics": Jsonb(storable(metrics)),
        }

        def write() -> None:
            with self.transaction() as connection:
                if fetch(connection, "train_step_done", **keys):  # by an earlier try, whose answer was lost
                    return
                fetch(connection, "insert_train_step", run_id=self.run.run_id, **keys, **result)
                for each in baselines:
                    execute(connection, "insert_role_baseline", run_id=self.run.run_id, **keys, **vars(each))

        ride_out(write)
        failpoint("trainer.recorded")
        notify.notify(self.run.database, notify.RUN)

    def role_baselines(self) -> dict[tuple[str, str], RoleBaseline]:
        """Return the baselines of roles as the last step of the attempt's history left them, by taskset and role."""
        rows = self.run.database.fetch("role_baselines", attempt_id=self.attempt_id)
        return {(found.taskset, found.role): found for found in records(RoleBaseline, rows)}

    def commit_checkpoint(
        self, step: int, uri: str, *, policy_version_id: int | None = None, num_bytes: int = 0
    ) -> int:
        """Record that the weights at `uri` contain the draws up to `step`; return the checkpoint_id."""
        check_integer("the trainer step of a checkpoint", step, (0, MAX_COUNT))
        weights = {"policy_version_id": policy_version_id, "uri": uri, "num_bytes": num_bytes}
        row = self._write_once(step, "insert_checkpoint", weights, "checkpoint_after", after=self._newest_checkpoint)
        self._newest_checkpoint = int(row["checkpoint_id"])
        failpoint("trainer.checkpoint_committed")
        return self._newest_checkpoint

    def _write_once(self, step: int, insert: str, values: dict[str, Any], find: str, **after: int) -> Row:
        """Insert a row of a step by a named statement, unless the statement `find` finds one: that of an earlier try, whose answer was lost.

        Args:
            after: the newest id that this object received, where a step may have several rows.
        """
        keys = {"attempt_id": self.attempt_id, "trainer_step": step}

        def write() -> Row:
            with self.transaction() as connection:
                earlier = fetch(connection, find, **keys, **after)
                return (earlier or fetch(connection, insert, run_id=self.run.run_id, **keys, **values))[0]

        return ride_out(write)

    def num_untrained_steps(self) -> tuple[int, int]:
        """Return how many steps the run's history has, and how many of them trained nothing."""
        (row,) = self.run.database.fetch("progress_untrained", run_id=self.run.run_id)
        return row["num_steps"], row["num_untrained"]

    def finish(self, outcome: str) -> None:
        """Record that the run has done its planned steps, and delete what was sampled of unfinished groups."""

        def write() -> None:
            with self.transaction() as connection:
                execute(connection, "finish_run", run_id=self.run.run_id, status="finished", outcome=outcome)
                execute(connection, "forget_unfinished", run_id=self.run.run_id)

        ride_out(write)
        notify.notify(self.run.database, notify.RUN)

    def forget_checkpoint(self, checkpoint_id: int) -> None:
        """Record that the files of a checkpoint are about to be removed; its row stays."""

        def write() -> None:
            with self.transaction() as connection:
                execute(connection, "forget_checkpoint", checkpoint_id=checkpoint_id)

        ride_out(write)
        failpoint("trainer.checkpoint_forgotten")


def _refuse_policy_spans(columns: Sequence[str]) -> None:
    if "policy_spans" in columns:
        raise QueryError(
            "a batch does not have this array",
            value="policy_spans",
            todo="read it with buffer.read_arrays(ids, ['policy_spans'])",
        )


def _check_priority(group_id: int, priority: float) -> None:
    if not (math.isfinite(priority) and priority >= 0):
        raise QueryError(
            f"the priority of group {group_id} is not valid",
            value=priority,
            allowed="finite numbers of at least 0",
        )


def _checkpoint(row: Row | None) -> Checkpoint | None:
    return None if row is None else records(Checkpoint, [row])[0]
