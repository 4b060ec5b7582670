"""The draws of an attempt: which groups or selected rows it holds for a trainer step.

One transaction draws and records (`rft.draw_groups`, or `rft.draw_selected` for a stored selection), in one round trip. The arrays are
checked before the batch is returned, so that a group whose arrays are damaged is dropped and another one drawn in its place.
"""

from __future__ import annotations

from collections.abc import Sequence

from rftdata.attempts.batch import Batch
from rftdata.attempts.hold import Hold
from rftdata.errors import PurgedError, RftError, SegmentCorruptError
from rftdata.failpoints import failpoint
from rftdata.postgres import notify
from rftdata.postgres.database import Connection, Row, execute, fetch, one, send
from rftdata.postgres.retry import ride_out
from rftdata.segments.reader import SegmentReader


class Draws:
    """The draws of one attempt, each named by its trainer step.

    Args:
        hold: of the attempt.
        max_refill: number of groups that the planner may add to a step in place of dropped ones.
    """

    def __init__(self, hold: Hold, reader: SegmentReader, max_refill: int) -> None:
        self._hold = hold
        self._keys = {"run_id": hold.run.run_id, "attempt_id": hold.attempt_id}
        self._reader = reader
        self._from_selection = hold.run.source_kind is not None
        self._max_refill = max_refill

    def draw(
        self, step: int, num_groups: int, columns: Sequence[str], *, ahead: bool = False
    ) -> tuple[Batch | None, str | None]:
        """Draw what is ready now, without a wait.

        Args:
            columns: token arrays to read.
            ahead: draw only a full batch, and do not decide that no more groups will come.

        Returns:
            A batch, or None and the groups whose review is awaited if nothing else is.
        """
        while True:
            drawn, rows = ride_out(lambda: self._try_draw(step, num_groups, ahead))
            if drawn["outcome"] != "drawn":
                return None, drawn["reason"]
            failpoint("trainer.drawn")
            if self._from_selection:
                self._refuse_purged(step)
            damaged = self._reader.damaged(sorted({row["segment_id"] for row in rows})) if columns else []
            if damaged and self._from_selection:
                raise damaged[0]  # a stored selection is trained on completely or not at all
            if not damaged:
                return Batch(step, rows, self._reader, columns, drawn["reason"]), None
            self._drop_damaged(step, rows, damaged)

    def _try_draw(self, step: int, num_groups: int, ahead: bool) -> tuple[Row, list[Row]]:
        """Return the result of `rft.draw_groups` or `rft.draw_selected` and the rows drawn: one round trip and one transaction."""
        with self._hold.run.database.connection() as connection, connection.pipeline():
            drawn = send(
                connection,
                "draw_selected" if self._from_selection else "draw_groups",
                **self._keys,
                step=step,
                wanted=num_groups,
                max_refill=self._max_refill,
                ahead=ahead,
            )
            rows = send(connection, "drawn_rows", **self._keys, step=step)
        result = one(drawn)
        if result["outcome"] == "fenced":
            raise self._hold.fenced_error()
        return result, rows.fetchall()

    def _refuse_purged(self, step: int) -> None:
        """Refuse a stored selection with purged rows, because it is trained on completely or not at all."""
        for row in self._hold.run.database.fetch("purged_of_draw", **self._keys, step=step):
            raise PurgedError(
                f"experience {row['experience_id']} of the run's stored selection was purged: {row['reason']}",
                todo="start a new run with the same sampling.source; this one cannot repeat its batches",
            )

    def _drop_damaged(self, step: int, rows: list[Row], damaged: Sequence[SegmentCorruptError]) -> None:
        """Undo a draw and close its groups with damaged arrays, so that the next try draws others."""
        why = {error.segment_id: error.what for error in damaged}
        lost = [row for row in rows if row["segment_id"] in why]
        reasons = {row["group_id"]: why[row["segment_id"]] for row in lost}

        def drop() -> None:
            with self._hold.transaction() as connection:
                if fetch(connection, "final_draws", attempt_id=self._hold.attempt_id, step=step):
                    raise damaged[0]
                self._undo(connection, step)
                damage = {
                    "group_ids": list(reasons),
                    "reasons": list(reasons.values()),
                    "experience_ids": [row["experience_id"] for row in lost],
                }
                execute(connection, "supersede_before_damage", **self._keys, **damage)
                execute(connection, "drop_damaged_groups", **self._keys, **damage)
                execute(connection, "reopen_stale_groups", **self._keys)

        ride_out(drop)
        notify.notify(self._hold.run.database, notify.READY)

    def are_current(self, step: int) -> bool:
        """Return whether a step's draws would give the same rows and rewards now."""
        name = "drawn_selected_state" if self._from_selection else "drawn_groups_state"
        outcome = self._hold.run.database.fetch_by_index(name, **self._keys, step=step)[0]["outcome"]
        if outcome == "fenced":
            raise self._hold.fenced_error()
        return bool(outcome == "same")

    def release(self, step: int) -> None:
        """Release what was drawn for a step; without effect if it is released already.

        Raises:
            RftError: the step is recorded as done, or a checkpoint contains it.
        """
        with self._hold.transaction() as connection:
            self._refuse_final(connection, step)
            if self._from_selection:
                execute(connection, "release_selected", **self._keys, step=step)
                execute(connection, "restore_selection", **self._keys)
                return
            self._undo(connection, step)
            # Meanwhile, labels treated the groups as drawn.
            execute(connection, "reopen_stale_groups", **self._keys)

    def _refuse_final(self, connection: Connection, step: int) -> None:
        for final in fetch(connection, "final_draws", attempt_id=self._hold.attempt_id, step=step):
            done = "recorded as done" if final["recorded"] else f"part of the checkpoint of step {final['checkpoint']}"
            raise RftError(
                f"the batch of step {step} cannot be released: the step is {done}",
                todo="release only what was not trained on; `rft run --resume RUN --at-step N` takes the run back",
            )

    def _undo(self, connection: Connection, step: int) -> None:
        """Delete the draws of a step. Those before them count as the newest again."""
        released = fetch(connection, "release_draws", **self._keys, step=step)
        execute(connection, "count_uses", run_id=self._keys["run_id"], group_ids=[row["item_id"] for row in released])
