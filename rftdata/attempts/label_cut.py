"""The label cut: the newest label that counts for what one transaction reads.

The cut is a label id. Ids are assigned before they are committed, so a label with a lower id could appear later. The cut is therefore
taken under a lock that waits for all sessions that are labelling. The transaction's snapshot is taken under the lock too, and the lock,
which another connection holds, is released at once. The transaction then sees exactly the labels up to the cut, however long it takes,
while people continue labelling.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg.errors

from rftdata.errors import ConflictError
from rftdata.postgres.database import Connection, Database, execute, fetch


@contextmanager
def at_label_cut(database: Database, *, read_only: bool = True) -> Iterator[tuple[Connection, int]]:
    """Open a transaction with a snapshot, and the newest label in it; the snapshot contains all labels up to it and no others.

    Args:
        read_only: on a connection of its own, for queries that a person wrote; see `Database.reading`.

    Raises:
        ConflictError: another session's labels stay uncommitted.
    """
    with database.reading() if read_only else database.transaction() as connection:
        if not read_only:
            connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        # The snapshot is that of the first query below, not that of BEGIN.
        with database.transaction() as locker:
            locker.execute("SET LOCAL lock_timeout = '30s'")
            try:
                execute(locker, "lock_labels")
            except psycopg.errors.LockNotAvailable as error:
                raise ConflictError(
                    "another session has changed rewards without a commit for 30 s, so it is unknown which labels count",
                    todo="commit or end that transaction (select * from pg_stat_activity where state like 'idle in%'), then run it again",
                ) from error
            cut = fetch(connection, "label_cut")[0]["label_cut"]
        yield connection, cut
