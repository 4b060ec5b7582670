"""The fencing of a run's attempts: only the newest one writes.

The attempt's id is the fencing token: every transaction first locks the run row in share mode and finds its own id there, so a
trainer that was replaced can do nothing any more, however late it wakes. One that is suspended inside a transaction cannot keep the run
locked: the server ends the transaction after two seconds (`limit_idleness`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rftdata.errors import FencedError
from rftdata.postgres.database import Connection, fetch
from rftdata.run import Run


class Fence:
    """What one attempt may still write.

    Attributes:
        run, attempt_id: what the attempt holds, and its key.
    """

    def __init__(self, run: Run, attempt_id: int) -> None:
        self.run = run
        self.attempt_id = attempt_id

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """A transaction that only the attempt holding the run can commit.

        Raises:
            FencedError: another attempt holds the run.
            BufferUnavailableError: the process stood still inside the transaction, and the server ended it.
        """
        with self.run.database.transaction() as connection:
            if not fetch(connection, "fence", run_id=self.run.run_id, attempt_id=self.attempt_id):
                raise self.error()
            yield connection

    def error(self) -> FencedError:
        """The error of an attempt that was replaced."""
        return FencedError(
            f"attempt {self.attempt_id} no longer holds the run {self.run.name!r}: a newer attempt took it over",
            todo="end this trainer; the newer one goes on from the last checkpoint",
        )
