"""The hold of an attempt on its run: the fence around its writes, and the lease of the process that trains.

Only the newest attempt of a run can write. Its id is the fencing token: every transaction first locks the run row in share mode and checks
for the id there, so a replaced trainer cannot write, however late it resumes. A trainer suspended inside a transaction does not keep the
run locked, because the server aborts the transaction after two seconds (`limit_idleness`).

The lease shows only that the holder is alive. While it lasts, no other process takes the run (`rftdata.attempts.takeover`).
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import psycopg

from rftdata.errors import BufferUnavailableError, FencedError, RftError, described
from rftdata.holder import mark_unheld
from rftdata.postgres import notify
from rftdata.postgres.database import Connection, fetch
from rftdata.postgres.retry import ride_out
from rftdata.run import Run

_LOOK_S = 1.0


class Hold:
    """The hold of one attempt on a run, from its creation to `close`; a context manager.

    Args:
        lease_s: seconds of silence after which the holder may be replaced; None for a process that joined the attempt of another one.
        receipt: with which the attempt was started; None for a process that joined.

    Attributes:
        run: the run, as it was before.
        attempt_id: the attempt's key.
    """

    def __init__(self, run: Run, attempt_id: int, *, lease_s: float | None, receipt: uuid.UUID | None) -> None:
        self.run = run
        self.attempt_id = attempt_id
        self._lease_s, self._receipt = lease_s, receipt
        self._listener = notify.Listener(run.database, notify.READY, notify.RUN, check=self.check)
        self._closed = threading.Event()
        self._is_lost = self._has_ended = False
        self._keeper = threading.Thread(target=self._keep, name="attempt", daemon=True)
        self._keeper.start()

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Open a transaction that only the attempt holding the run can commit.

        Raises:
            FencedError: another attempt holds the run.
            BufferUnavailableError: the process was suspended inside the transaction, and the server aborted it.
        """
        with self.run.database.transaction() as connection:
            if not fetch(connection, "fence", run_id=self.run.run_id, attempt_id=self.attempt_id):
                raise self.fenced_error()
            yield connection

    def check(self) -> None:
        """Raise if another attempt has taken the run, which a thread looks up every second. Every wait of a trainer for others calls it.

        Costs nothing, and may be called from any thread.

        Raises:
            FencedError: another attempt holds the run.
        """
        if self._is_lost:
            raise self.fenced_error()

    def fenced_error(self) -> FencedError:
        """Return the error of a replaced attempt."""
        return FencedError(
            f"attempt {self.attempt_id} no longer holds the run {self.run.name!r}: a newer attempt took it over",
            todo="end this trainer; the newer one continues from the last checkpoint",
        )

    def wait(self, timeout_s: float = notify.POLL_S) -> bool:
        """Wait for a change of the run or a ready group; return False after `timeout_s`. For one thread at a time.

        Raises:
            FencedError: another attempt holds the run.
        """
        return self._listener.wait(timeout_s)

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
                mark_unheld(self._receipt)
        if self._lease_s is not None and not self._has_ended:
            ride_out(
                lambda: self.run.database.run("end_attempt", attempt_id=self.attempt_id, outcome=outcome),
                limit_s=patience_s,
            )
            self._has_ended = True

    def __enter__(self) -> Self:
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
