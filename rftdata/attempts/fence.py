"""Fencing of a run's attempts: only the newest one can write.

The attempt's id is the fencing token. Every transaction first locks the run row in share mode and checks for its id there, so a
replaced trainer cannot write, however late it resumes. A trainer suspended inside a transaction does not keep the run
locked, because the server aborts the transaction after two seconds (`limit_idleness`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rftdata.errors import FencedError
from rftdata.postgres.database import Connection, fetch
from rftdata.run import Run


class Fence:
    """Guards the writes of one attempt.

    Attributes:
        run, attempt_id: the run that the attempt holds, and the attempt's key.
    """

    def __init__(self, run: Run, attempt_id: int) -> None:
        self.run = run
        self.attempt_id = attempt_id

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Open a transaction that only the attempt holding the run can commit.

        Raises:
            FencedError: another attempt holds the run.
            BufferUnavailableError: the process was suspended inside the transaction, and the server aborted it.
        """
        with self.run.database.transaction() as connection:
            if not fetch(connection, "fence", run_id=self.run.run_id, attempt_id=self.attempt_id):
                raise self.error()
            yield connection

    def error(self) -> FencedError:
        """Return the error of a replaced attempt."""
        return FencedError(
            f"attempt {self.attempt_id} no longer holds the run {self.run.name!r}: a newer attempt took it over",
            todo="end this trainer; the newer one continues from the last checkpoint",
        )
