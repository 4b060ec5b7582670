"""One attempt of a run's trainer: its lease, draws, published weights and checkpoints.

An attempt that was replaced cannot write (`rftdata.attempts.fence`); the lease shows only that the holder is alive. A new
attempt continues from the last checkpoint of the previous one. Draws made after that checkpoint belong to a history that ended,
and their groups can be drawn again.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from rftdata.attempts import takeover
from rftdata.attempts.batch import Batch
from rftdata.attempts.checkpoints import Checkpoint
from rftdata.attempts.drawing import Drawing
from rftdata.attempts.fence import Fence
from rftdata.attempts.sampling import SamplingConfig, checked_formula
from rftdata.errors import BufferUnavailableError, QueryError, RftError, described
from rftdata.failpoints import failpoint
from rftdata.limits import MAX_COUNT, check_integer
from rftdata.postgres import notify
from rftdata.postgres.database import Connection, Row, execute, fetch, records
from rftdata.postgres.retry import ride_out
from rftdata.postgres.values import storable
from rftdata.run import Run
from rftdata.segments.reader import SegmentReader
from rftdata.workers.worker import mark_dead_workers

_LOOK_S = 1.0
ARRAYS = ("token_ids", "loss_mask", "behavior_logprobs")


class Attempt:
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
        self.run = run
        self._lease_s, self._receipt = lease_s, receipt
        self._has_ended = False
        self._listener = notify.Listener(run.database, notify.READY, notify.RUN, check=self.check)
        self._closed = threading.Event()
        self._is_lost = False
        self.attempt_id = attempt_id
        self.checkpoint = checkpoint
        self.start_step = checkpoint.trainer_step if checkpoint else 0
        self._newest_version = self._newest_checkpoint = (
            0  # ids that this object received; a newer one is from a try whose answer was lost
        )
        self._fence = Fence(run, attempt_id)
        self._drawing = Drawing(self._fence, reader, self._listener, max_refill)
        self._keeper = threading.Thread(target=self._keep, name="attempt", daemon=True)
        self._keeper.start()

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
        mark_dead_workers(run)
        receipt = uuid.uuid4()
        try:
            attempt_id, checkpoint = ride_out(lambda: takeover.take(run, receipt, lease_s, policy))
            failpoint("trainer.started")
            notify.notify(run.database, notify.RUN)
            return cls(run, reader, attempt_id, _of_row(checkpoint), lease_s, max_refill, receipt)
        except BaseException:
            takeover.give_up(run, receipt)
            raise

    @classmethod
    def join(cls, run: Run, reader: SegmentReader, attempt_id: int, max_refill: int) -> Attempt:
        """Join an attempt of another process as a further rank: see `Buffer.join_attempt`."""

        def look() -> tuple[Row, list[Row]]:
            with run.database.transaction() as connection:
                locked = fetch(connection, "lock_run", run_id=run.run_id)[0]
                return locked, fetch(connection, "last_checkpoint", attempt_id=attempt_id, step=None)

        locked, found = ride_out(look)
        attempt = cls(run, reader, attempt_id, _of_row(found[0] if found else None), None, max_refill)
        if locked["current_attempt_id"] != attempt_id:
            attempt.close()
            raise attempt._fence.error()
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
        return self._drawing.draw(
            step, num_groups, columns, share=share, timeout_s=timeout_s, stop=stop, waiting=waiting
        )

    def draw_ahead(self, step: int, num_groups: int, columns: Sequence[str] = ARRAYS) -> Batch | None:
        """Draw a step's batch while the step before it is trained: the full batch if it is ready now, otherwise None.

        It neither waits nor decides that no more groups will come. It may be called from another thread than the other methods. Ask
        `is_current` before the batch is trained on, and `release` it if it is not used.

        Raises:
            FencedError, SegmentCorruptError, PurgedError, BufferUnavailableError: see `draw`. Rows may have been drawn: call `release_step`.
        """
        return self._drawing.draw_ahead(step, num_groups, columns)

    def is_current(self, batch: Batch) -> bool:
        """Return whether a draw of the batch's groups would give the same rows and rewards now.

        False after a label or an answer to a review, a verdict, a purge, or another pipeline of the run. If so, release the batch and
        draw again.

        Raises:
            FencedError: another attempt holds the run.
        """
        return self._drawing.is_current(batch.step)

    def release(self, batch: Batch) -> None:
        """Release an unused batch: its draws never took place. See `release_step`."""
        self.release_step(batch.step)

    def release_step(self, step: int) -> None:
        """Release whatever was drawn for a step and not trained on.

        Raises:
            FencedError: another attempt holds the run.
            RftError: the step is recorded as done, or a checkpoint contains it.
        """
        self._drawing.release(step)

    def set_priorities(self, priorities: Mapping[int, float]) -> int:
        """Set priorities of groups (by group_id), for orders by priority and for formulas that use `priority`.

        Returns:
            The number of these groups in this run; others are skipped.

        Raises:
            FencedError: another attempt holds the run.
            QueryError: a priority is negative or not a finite number.
        """
        for group_id, priority in priorities.items():
            if not (math.isfinite(priority) and priority >= 0):
                raise QueryError(
                    f"the priority of group {group_id} is not valid",
                    value=priority,
                    allowed="finite numbers of at least 0",
                )

        def attempted() -> int:
            with self.transaction() as connection:
                found = fetch(
                    connection,
                    "set_priorities",
                    run_id=self.run.run_id,
                    item_ids=list(priorities),
                    priorities=[float(value) for value in priorities.values()],
                )
            return int(found[0]["num_known"])

        return ride_out(attempted)

    def publish(self, step: int, *, method: str, uri: str, num_bytes: int, checksum: str) -> int:
        """Announce the weights after `step` and wake the explorers; return the policy_version_id."""
        check_integer("the trainer step of published weights", step, (0, MAX_COUNT))
        row = self._write_once(
            "insert_policy_version",
            {
                "run_id": self.run.run_id,
                "attempt_id": self.attempt_id,
                "trainer_step": step,
                "method": method,
                "uri": uri,
                "num_bytes": num_bytes,
                "checksum": checksum,
            },
            "policy_version_after",
            {"attempt_id": self.attempt_id, "trainer_step": step, "after": self._newest_version},
        )
        self._newest_version = int(row["policy_version_id"])
        failpoint("trainer.published")
        notify.notify(self.run.database, notify.POLICY)
        return self._newest_version

    def _write_once(self, write: str, values: dict[str, Any], look: str, known: dict[str, Any]) -> Row:
        """Run a named statement that returns its row, unless an earlier try has written it whose answer was lost."""

        def attempted() -> Row:
            with self.transaction() as connection:
                return (fetch(connection, look, **known) or fetch(connection, write, **values))[0]

        return ride_out(attempted)

    def record_step(
        self,
        step: int,
        batch: Batch,
        *,
        wait_seconds: float,
        train_seconds: float,
        publish_seconds: float,
        metrics: dict[str, float],
    ) -> None:
        """Record that a step is done; a batch without experiences is a skipped step."""
        self._write_once(
            "insert_train_step",
            {
                "attempt_id": self.attempt_id,
                "trainer_step": step,
                "run_id": self.run.run_id,
                "outcome": "trained" if len(batch) else "skipped",
                "reason": batch.short_reason,
                "num_groups": batch.num_groups,
                "num_experiences": len(batch),
                "num_tokens": int(batch.lengths.sum()),
                "wait_seconds": wait_seconds,
                "train_seconds": train_seconds,
                "publish_seconds": publish_seconds,
                "metrics": Jsonb(storable(metrics)),
            },
            "train_step_done",
            {"attempt_id": self.attempt_id, "trainer_step": step},
        )
        failpoint("trainer.recorded")
        notify.notify(self.run.database, notify.RUN)

    def commit_checkpoint(
        self, step: int, uri: str, *, policy_version_id: int | None = None, num_bytes: int = 0
    ) -> int:
        """Record that the weights at `uri` contain the draws up to `step`; return the checkpoint_id."""
        check_integer("the trainer step of a checkpoint", step, (0, MAX_COUNT))
        row = self._write_once(
            "insert_checkpoint",
            {
                "run_id": self.run.run_id,
                "attempt_id": self.attempt_id,
                "trainer_step": step,
                "policy_version_id": policy_version_id,
                "uri": uri,
                "num_bytes": num_bytes,
            },
            "checkpoint_after",
            {"attempt_id": self.attempt_id, "trainer_step": step, "after": self._newest_checkpoint},
        )
        self._newest_checkpoint = int(row["checkpoint_id"])
        failpoint("trainer.checkpoint_committed")
        return self._newest_checkpoint

    def transaction(self) -> AbstractContextManager[Connection]:
        """Open a transaction that only the attempt holding the run can commit: see `Fence.transaction`."""
        return self._fence.transaction()

    def check(self) -> None:
        """Raise if another attempt has taken the run, as a look at it every second finds. Every wait of a trainer for others calls it.

        Costs nothing, and may be called from any thread.

        Raises:
            FencedError: another attempt holds the run.
        """
        if self._is_lost:
            raise self._fence.error()

    def wait(self, timeout_s: float = notify.POLL_S) -> bool:
        """Wait for a change of the run or a ready group; return False after `timeout_s`. For one thread at a time.

        Raises:
            FencedError: another attempt holds the run.
        """
        return self._listener.wait(timeout_s)

    def num_untrained_steps(self) -> tuple[int, int]:
        """Return how many steps the run's history has, and how many of them trained nothing."""
        (row,) = self.run.database.fetch("progress_untrained", run_id=self.run.run_id)
        return row["num_steps"], row["num_untrained"]

    def finish(self, outcome: str) -> None:
        """Record that the run has done its planned steps; what was sampled of unfinished groups is deleted."""

        def finished() -> None:
            with self.transaction() as connection:
                execute(connection, "finish_run", run_id=self.run.run_id, status="finished", outcome=outcome)
                execute(connection, "forget_unfinished", run_id=self.run.run_id)

        ride_out(finished)
        notify.notify(self.run.database, notify.RUN)

    def forget_checkpoint(self, checkpoint_id: int) -> None:
        """Record that the files of a checkpoint are about to be removed; its row stays."""
        ride_out(lambda: self._execute("forget_checkpoint", checkpoint_id=checkpoint_id))
        failpoint("trainer.checkpoint_forgotten")

    def _execute(self, name: str, **parameters: Any) -> None:
        with self.transaction() as connection:
            execute(connection, name, **parameters)

    def close(self, outcome: str = "ended", *, patience_s: float | None = None) -> None:
        """Release the lease; a process that only joined just leaves.

        Args:
            patience_s: how long to wait for an unavailable database; None for the default.
        """
        if not self._closed.is_set():
            self._closed.set()
            self._listener.close()
            self._keeper.join()
            if self._receipt is not None:
                takeover.mark_unheld(self._receipt)
        if self._lease_s is not None and not self._has_ended:
            ride_out(
                lambda: self.run.database.run("end_attempt", attempt_id=self.attempt_id, outcome=outcome),
                limit_s=patience_s,
            )
            self._has_ended = True

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        # An unavailable database was already waited for.
        patience_s = 0.0 if isinstance(error, BufferUnavailableError) else None
        try:
            self.close("ended" if error is None else described(error), patience_s=patience_s)
        except (RftError, psycopg.Error):
            if error is None:  # otherwise it would hide the first error
                raise

    def _keep(self) -> None:
        """Renew the lease, and look whether the run is still this attempt's: it may be lost whatever the lease says."""
        renewed_at = time.monotonic()
        renew_every_s = math.inf if self._lease_s is None else self._lease_s / 3
        while not self._closed.wait(min(_LOOK_S, renew_every_s)):
            # The server is restarting or its disk is full for a moment: the next look tries again.
            with contextlib.suppress(RftError, psycopg.Error):
                with self.run.database.connection() as connection:
                    held = fetch(connection, "holds_run", run_id=self.run.run_id, attempt_id=self.attempt_id)[0]["held"]
                if not held:
                    self._is_lost = True
                    return
                if time.monotonic() - renewed_at >= renew_every_s:
                    self.run.database.run("renew_attempt", attempt_id=self.attempt_id, lease_s=self._lease_s)
                    renewed_at = time.monotonic()


def _of_row(checkpoint: Row | None) -> Checkpoint | None:
    return None if checkpoint is None else records(Checkpoint, [checkpoint])[0]
