"""One life of a run's trainer: its lease, its draws, its published weights, its checkpoints.

The attempt's id is the fencing token: every transaction here first locks the run row in share mode and finds its own id
there, so a trainer that was replaced can do nothing any more, however late it wakes. The lease says only that the holder
is alive. A new attempt goes on from the last checkpoint of the one before it: draws made after that checkpoint belong to
a history that ended, and their groups can be drawn again.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from psycopg.types.json import Jsonb

from rftdata import wake
from rftdata.batch import Batch, SegmentReader
from rftdata.database import Connection, Row, execute, fetch
from rftdata.errors import BufferUnavailableError, ConflictError, FencedError
from rftdata.worker import mark_dead_workers, process_lives

if TYPE_CHECKING:
    from collections.abc import Callable

    from rftdata.database import Database

ARRAYS = ("token_ids", "loss_mask", "behavior_logprobs")


class Attempt:
    """An attempt that holds its run; made by `Buffer.attempt`.

    Attributes:
        attempt_id, run_id: keys.
        checkpoint: the row of the checkpoint it goes on from; None when it starts from the initial weights.
        start_step: trainer steps already done on its history.
    """

    def __init__(
        self, database: Database, reader: SegmentReader, run: Row, row: Row, checkpoint: Row | None, lease_s: float,
        max_staleness: int, max_refill: int,
    ) -> None:  # fmt: skip
        self._database = database
        self._reader = reader
        self._run = run
        self._lease_s = lease_s
        self._max_staleness = max_staleness
        self._max_refill = max_refill
        self._closed = threading.Event()
        self.attempt_id: int = row["attempt_id"]
        self.run_id: int = run["run_id"]
        self.checkpoint = checkpoint
        self.start_step: int = checkpoint["trainer_step"] if checkpoint else 0
        self._keeper = threading.Thread(target=self._keep_lease, name="attempt-lease", daemon=True)
        self._keeper.start()

    @classmethod
    def start(
        cls, database: Database, reader: SegmentReader, run_id: int, lease_s: float, max_staleness: int, max_refill: int
    ) -> Attempt:
        """Take the run: see `Buffer.attempt`."""
        mark_dead_workers(database, run_id)
        with database.transaction() as connection:
            run = fetch(connection, "lock_run", run_id=run_id)[0]
            parent = run["current_attempt_id"]
            checkpoint = None
            if parent is not None:
                _refuse_if_held(fetch(connection, "attempt_holder", attempt_id=parent)[0], run)
                found = fetch(connection, "last_checkpoint", attempt_id=parent)
                checkpoint = found[0] if found else None
            row = fetch(
                connection, "insert_attempt", run_id=run_id, parent_attempt_id=parent,
                from_checkpoint_id=checkpoint["checkpoint_id"] if checkpoint else None,
                host=socket.gethostname(), pid=os.getpid(), lease_s=lease_s,
            )[0]  # fmt: skip
            execute(connection, "take_run", run_id=run_id, attempt_id=row["attempt_id"])
            execute(connection, "return_aged", run_id=run_id)
            execute(connection, "return_draws", run_id=run_id, attempt_id=row["attempt_id"])
            execute(connection, "reopen_stale_groups", run_id=run_id)
            fetch(connection, "release_lost_claims", run_id=run_id)
            execute(connection, "drop_lost_evaluations", run_id=run_id)
        wake.notify(database, wake.RUN)
        return cls(database, reader, run, row, checkpoint, lease_s, max_staleness, max_refill)

    def draw(
        self, step: int, num_groups: int, columns: Sequence[str] = ARRAYS, *, timeout_s: float | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> Batch | None:  # fmt: skip
        """The batch of a trainer step: whole ready groups, first in first out, claimed in one transaction.

        Waits for groups. When no more can come for this step (every group is decided and the refill is used up) the batch is
        short, and its `short_reason` says why; it may be empty. A step drawn before by this attempt is drawn no second time.

        Args:
            step: trainer step, from 1; it draws groups of explorer steps before it.
            num_groups: groups wanted.
            columns: token arrays wanted.
            timeout_s: give up after this long; None waits for ever.
            stop: asked between waits; a true answer gives up.

        Returns:
            The batch, or None when it gave up.

        Raises:
            FencedError: another attempt holds the run.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        listener = wake.Listener(self._database, wake.READY, wake.RUN)
        try:
            while True:
                short = self._try_draw(step, num_groups)
                if short is not None:
                    rows = self._database.fetch("drawn_rows", attempt_id=self.attempt_id, step=step)
                    return Batch(step, rows, self._reader, columns, short or None)
                if stop() or (deadline is not None and time.monotonic() > deadline):
                    return None
                listener.wait()
        finally:
            listener.close()

    def _try_draw(self, step: int, num_groups: int) -> str | None:
        """None: not yet. Otherwise drawn; the string says why the batch is short (empty when it is full)."""
        with self._database.transaction() as connection:
            self._fence(connection)
            drawn = fetch(connection, "groups_drawn", attempt_id=self.attempt_id, step=step)[0]["num_groups"]
            if drawn:
                return "" if drawn >= num_groups else f"{drawn} of {num_groups} groups were drawn for this step before"
            aged = execute(connection, "age_out", run_id=self.run_id, step=step, max_staleness=self._max_staleness)
            supply = fetch(connection, "step_supply", run_id=self.run_id, explore_step=step - 1)[0]
            short = "" if supply["available"] >= num_groups else self._exhausted(supply, num_groups)
            if short is None:
                if aged:
                    connection.execute("SELECT pg_notify(%s, '')", [wake.READY])
                return None
            picked = fetch(
                connection, "pick_groups", run_id=self.run_id, step=step, explore_step=step - 1, num_groups=num_groups,
                max_staleness=self._max_staleness,
            )  # fmt: skip
            if len(picked) < min(num_groups, supply["available"]):
                return None  # a relabel holds some of them at this moment: look again
            execute(
                connection, "draw_groups", run_id=self.run_id, attempt_id=self.attempt_id, step=step,
                group_ids=[row["item_id"] for row in picked], pipeline_version=self._run["pipeline_version"],
            )  # fmt: skip
            return short

    def _exhausted(self, supply: Row, num_groups: int) -> str | None:
        """Why no more groups will come for the step; None while more may."""
        found = f"{supply['available']} of {num_groups} groups survived"
        if self._run["mode"] == "train":
            return None if supply["undecided_ever"] else f"{found}: the stored experiences are used up"
        if supply["undecided"] or supply["base"] < num_groups or supply["refills"] < self._max_refill:
            return None
        return f"{found}: {supply['base']} planned and {supply['refills']} refilled, explorer.max_refill is used up"

    def release(self, batch: Batch) -> None:
        """Give a batch back unused: its draws never took place."""
        with self._database.transaction() as connection:
            self._fence(connection)
            execute(connection, "release_draws", run_id=self.run_id, attempt_id=self.attempt_id, step=batch.step)
            # Labels that came meanwhile took it for drawn.
            execute(connection, "reopen_stale_groups", run_id=self.run_id)
        wake.notify(self._database, wake.READY)

    def publish(self, step: int, *, method: str, uri: str, num_bytes: int, checksum: str) -> int:
        """Announce weights that stand after `step`; returns the policy_version_id. Wakes explorers."""
        with self._database.transaction() as connection:
            self._fence(connection)
            version = fetch(
                connection, "insert_policy_version", run_id=self.run_id, attempt_id=self.attempt_id, trainer_step=step,
                method=method, uri=uri, num_bytes=num_bytes, checksum=checksum,
            )[0]["policy_version_id"]  # fmt: skip
        wake.notify(self._database, wake.POLICY)
        return int(version)

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
        """Note that a step is done; a batch without experiences is a skipped step."""
        with self._database.transaction() as connection:
            self._fence(connection)
            execute(
                connection, "insert_train_step", attempt_id=self.attempt_id, trainer_step=step, run_id=self.run_id,
                outcome="trained" if len(batch) else "skipped", reason=batch.short_reason, num_groups=batch.num_groups,
                num_experiences=len(batch), num_tokens=int(batch.lengths.sum()), wait_seconds=wait_seconds,
                train_seconds=train_seconds, publish_seconds=publish_seconds,
                metrics=Jsonb({key: value for key, value in metrics.items() if value == value and abs(value) != float("inf")}),
            )  # fmt: skip
        wake.notify(self._database, wake.RUN)

    def commit_checkpoint(
        self, step: int, uri: str, *, policy_version_id: int | None = None, num_bytes: int = 0
    ) -> int:
        """The draws up to `step` are consumed: the weights at `uri` contain them. Returns the checkpoint_id."""
        with self._database.transaction() as connection:
            self._fence(connection)
            row = fetch(
                connection, "insert_checkpoint", run_id=self.run_id, attempt_id=self.attempt_id, trainer_step=step,
                policy_version_id=policy_version_id, uri=uri, num_bytes=num_bytes,
            )[0]  # fmt: skip
        return int(row["checkpoint_id"])

    def close(self, outcome: str = "ended") -> None:
        """Give the lease back."""
        if not self._closed.is_set():
            self._closed.set()
            self._keeper.join()
            self._database.run("end_attempt", attempt_id=self.attempt_id, outcome=outcome)

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        try:
            self.close("ended" if error is None else f"{type(error).__name__}: {error}")
        except BufferUnavailableError:
            if error is None:  # else it would hide what went wrong first
                raise

    def _fence(self, connection: Connection) -> None:
        if not fetch(connection, "fence", run_id=self.run_id, attempt_id=self.attempt_id):
            raise FencedError(
                f"attempt {self.attempt_id} no longer holds the run {self._run['name']!r}: a newer attempt took it over",
                todo="end this trainer; the newer one goes on from the last checkpoint",
            )

    def _keep_lease(self) -> None:
        while not self._closed.wait(self._lease_s / 3):
            try:
                self._database.run("renew_attempt", attempt_id=self.attempt_id, lease_s=self._lease_s)
            except (BufferUnavailableError, ConflictError):
                continue  # the server restarts; the next renewal tries again


def _refuse_if_held(holder: Row, run: Row) -> None:
    same_host = holder["host"] == socket.gethostname()
    if not holder["alive"] or (same_host and not process_lives(holder["pid"])):
        return
    raise FencedError(
        f"the run {run['name']!r} is being trained by process {holder['pid']} on {holder['host']}",
        todo="stop that one first, or wait until its lease ends",
    )
