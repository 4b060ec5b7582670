"""`Worker`: this process in the buffer. Its row, its heartbeat, its reported state and the spans of its activities.

The leases of its claims are in `rftdata.workers.leases`.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from rftdata.errors import BufferUnavailableError, RftError, described
from rftdata.postgres import notify
from rftdata.postgres.database import Row, execute
from rftdata.postgres.retry import ride_out
from rftdata.postgres.values import storable
from rftdata.processes import own_process
from rftdata.run import Run
from rftdata.workers.leases import release_lost_claims, renew_claims
from rftdata.workers.live_workers import record_exited_workers
from rftdata.workers.spans import Activity, Spans

HEARTBEAT_S = 2.0
# Shorter waits are part of the work.
_WAITS_S = 4.0
# The notifications each role waits for.
_WAKES = {
    "explorer": (notify.PLANNED, notify.POLICY, notify.READY, notify.RUN, notify.SHARED_DEVICE),
    "pipeline": (notify.SEALED, notify.RUN),
    "trainer": (notify.RUN,),
}

_FAILURES = (RftError, psycopg.Error)


class Worker:
    """Registers on entering, sends heartbeats from a separate thread, and records on leaving whether it failed.

    The remaining workers of a run, on any machine, continue it. A new worker releases at once what exited processes on its machine
    held, and every worker's heartbeat releases what lost workers anywhere hold.

    Args:
        run: the run it works for.
        role: explorer, pipeline, trainer, supervisor or replay.
        lease_s: how long its claims are valid without a heartbeat.
        phases: the parts of its start until now, with the times of `time.monotonic` at which they began. It then counts from the first one.
        on_waiting: called with every heartbeat, from another thread, once it has been waiting for a few seconds, with what it waits for.
    """

    def __init__(
        self,
        run: Run,
        role: str,
        *,
        lease_s: float = 60.0,
        phases: Sequence[tuple[str, float]] = (),
        on_waiting: Callable[[str], None] | None = None,
    ) -> None:
        self._database = run.database
        self._listener = notify.Listener(run.database, *_WAKES.get(role, ()))
        self._lease_s = lease_s
        self._stopped = threading.Event()
        self._has_left = False
        self._state = "starting"
        self._waiting_for: str | None = None
        self._spans = Spans(phases=phases)
        self._on_waiting = on_waiting
        self._waits_since = time.monotonic()
        self._heartbeat_error: str | None = None
        self.run = run
        self.role = role
        self.progress: dict[str, Any] = {}
        record_exited_workers(run)
        self.worker_id = _register(run, role)
        if phases:
            run.database.ride_out(partial(self._count_from, phases[0][1]))
        self._thread = threading.Thread(target=self._beat_often, name="heartbeat", daemon=True)
        self._thread.start()

    def _count_from(self, begun: float) -> None:
        self._database.run("count_worker_from", worker_id=self.worker_id, age_s=time.monotonic() - begun)

    def set_state(self, state: str, waiting_for: str | None = None, *, activity: Activity = "working") -> None:
        """Set what it does now, and what it waits for; `rft status` shows it after the next heartbeat.

        Args:
            activity: under which `rft report` counts the time from now on; `waiting` if it waits for something.
        """
        # The span stays, and so an error after a colon, which may quote a text, is not part of it.
        self._spans.change("waiting" if waiting_for else activity, waiting_for and waiting_for.partition(": ")[0])
        changed = (state, waiting_for) != (self._state, self._waiting_for)
        self._state, self._waiting_for = state, waiting_for
        if changed:
            self._waits_since = time.monotonic()
            with contextlib.suppress(*_FAILURES):
                self._beat()  # this is only information: the work continues, and the next heartbeat reports it

    def wait(self, timeout_s: float = notify.POLL_S) -> bool:
        """Wait for a change in the role's work; return False after `timeout_s`. For one thread at a time."""
        return self._listener.wait(timeout_s)

    def should_stop(self) -> bool:
        """Return whether the run was asked to stop or has ended."""
        state = self._state_of_run()
        return bool(state["stop_requested"] or state["has_ended"])

    def is_asked_to_stop(self) -> bool:
        """Return whether the run was asked to stop."""
        return bool(self._state_of_run()["stop_requested"])

    def _state_of_run(self) -> Row:
        return self._database.fetch("run_state", run_id=self.run.run_id)[0]

    def stop(self, error: str | None = None, *, patience_s: float | None = None) -> None:
        """Leave the run and release the claims it still holds.

        Args:
            patience_s: how long to wait for an unavailable database; None for the default.
        """
        if self._has_left:
            return
        if not self._stopped.is_set():
            self._stopped.set()
            self._listener.close()
            self._thread.join()
        ride_out(self._store_spans, limit_s=patience_s)
        ride_out(lambda: self._record_end(error), limit_s=patience_s)
        ride_out(lambda: release_lost_claims(self.run), limit_s=patience_s)
        self._has_left = True
        notify.notify(self._database, notify.RUN)

    def _record_end(self, error: str | None) -> None:
        with self._database.transaction() as connection:
            execute(connection, "lock_worker", worker_id=self.worker_id)
            execute(connection, "stop_worker", worker_id=self.worker_id, error=error)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if isinstance(error, BufferUnavailableError):  # it has already been waited for
                self.stop(str(error), patience_s=0.0)
            else:
                self.stop(None if error is None else described(error))
        except _FAILURES:
            if error is None:
                raise  # otherwise the error that ended the work is more important than this one

    def _beat_often(self) -> None:
        looked_at = time.monotonic()
        while not self._stopped.wait(HEARTBEAT_S):
            try:
                renew_claims(self.run, self.worker_id, self._lease_s)  # first, before the rest takes time
                self._beat()
                self._store_spans()
                if time.monotonic() - looked_at >= self._lease_s / 4:
                    release_lost_claims(self.run)
                    looked_at = time.monotonic()
                self._report_waiting()
            except _FAILURES as error:
                # The server restarts, its disk is full, …: the lease outlasts that, and so must this thread.
                what = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                self._heartbeat_error = f"at {time.strftime('%H:%M:%S')}, {what}"

    def _report_waiting(self) -> None:
        if self._on_waiting is None or self._waiting_for is None:
            return
        if time.monotonic() - self._waits_since >= _WAITS_S:
            self._on_waiting(describe_state(self._state, self._waiting_for))

    def _store_spans(self) -> None:
        spans = self._spans.pending()
        now = spans[-1].ended
        self._database.run(
            "store_spans",
            worker_id=self.worker_id,
            ordinals=[span.ordinal for span in spans],
            activities=[span.activity for span in spans],
            details=[span.detail for span in spans],
            start_ages=[now - span.started for span in spans],
            end_ages=[now - span.ended for span in spans],
        )
        self._spans.stored(spans)

    def _beat(self) -> None:
        progress = dict(self.progress)
        if self._heartbeat_error:
            progress["last_heartbeat_error"] = self._heartbeat_error
        with self._database.transaction() as connection:
            if ": " in (self._waiting_for or ""):
                execute(connection, "lock_worker", worker_id=self.worker_id)
            execute(
                connection,
                "heartbeat",
                worker_id=self.worker_id,
                state=self._state,
                waiting_for=self._waiting_for,
                progress=Jsonb(storable(progress)),
            )


def _register(run: Run, role: str) -> int:
    """Return the id of a new worker; the one that an earlier try has made, if its answer was lost."""
    who = {"run_id": run.run_id, "role": role, **own_process()}

    def newest() -> int:
        return int(run.database.fetch("newest_worker_of_process", **who)[0]["worker_id"])

    before, tries = newest(), itertools.count()

    def insert() -> int:
        # At the first try, a newer worker is that of another thread.
        if next(tries) and (newer := newest()) != before:
            return newer
        return int(run.database.fetch("insert_worker", **who)[0]["worker_id"])

    return run.database.ride_out(insert)


def describe_state(state: str, waiting_for: str | None) -> str:
    """Describe what a worker does, in a few words."""
    if not waiting_for:
        return state
    waits = f"waits for {waiting_for}"
    return waits if state in ("waits", "waiting") else f"{state}: {waits}"
