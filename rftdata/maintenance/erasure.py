"""Removal of the bytes of purged rows: of old versions in the tables, and of old arrays in the segments.

Arrays are overwritten later than they are purged, because a reader that looked a segment up before may still map them. All readers look
addresses up again after `segments.ADDRESS_MAX_AGE_S`, and `GRACE_S` is longer. A file that compaction removes meanwhile is overwritten
first.

Ranges that no row names are overwritten too, since they may hold purged arrays: of writes that were not committed, and of segments that were
moved or archived. Below the committed size of a file they are retired like purged ones. Nothing is committed to them any more, as a writer
commits one batch after the other. Beyond it they may be a writer's that is about to commit, and compaction overwrites them when the file
is closed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from rftdata.buffer import Buffer
from rftdata.errors import BufferUnavailableError, RftError
from rftdata.segments.compaction import DEFAULT_GRACE_S, Compactor

GRACE_S = DEFAULT_GRACE_S
_CLOSING_S = 2.0
# The first table of docs/decisions/0045 names them; a test compares the two.
TABLES_WITH_TEXTS = (
    "rft.experience",
    "rft.group_prompt",
    "rft.group_baseline",
    "rft.rollout",
    "rft.task",
    "rft.evaluation_answer",
    "rft.verdict",
    "rft.operator_run",
    "rft.score",
    "rft.review",
    "rft.annotation",
    "rft.comment",
    "rft.task_verdict",
    "rft.task_score",
    "rft.task_embedding",
    "rft.evaluation",
    "rft.partial_tokens",
    "rft.rollout_group",
    "rft.run",
    "rft.worker",
)


@dataclass(frozen=True)
class ErasureResult:
    """Ranges that were overwritten, and ranges that wait because a reader might still map them."""

    num_ranges: int
    num_bytes: int
    num_ranges_left: int
    num_bytes_left: int


def vacuum(buffer: Buffer, *, rewrite: bool, tables: Sequence[str] = TABLES_WITH_TEXTS) -> int:
    """Remove old versions of rows and stale planner statistics; return the number of rewritten tables.

    Args:
        rewrite: rewrite the tables, so that no byte of the old versions stays in their files, and their space returns to the disk. It locks
            them meanwhile. Otherwise new rows use the space.
        tables: those with texts, by default.
    """
    options = "FULL, ANALYZE" if rewrite else "ANALYZE"
    with buffer.database.connection() as connection:
        connection.execute(f"VACUUM ({options}) {', '.join(tables)}")
    return len(tables) if rewrite else 0


def erase(buffer: Buffer, *, now: bool = False) -> ErasureResult:
    """Overwrite purged arrays that no reader can map any more, and remove files that may contain older copies.

    Args:
        now: do not wait for `GRACE_S`, nor for the grace of compaction.

    Raises:
        BufferUnavailableError: with `now`, other sessions use the buffer; or a file cannot be written.
        RftError: a row names a file that is not this buffer's; what can be overwritten is.
    """
    database = buffer.database
    if now and (others := _others(buffer)):
        raise BufferUnavailableError(
            f"other sessions use the buffer and may be reading the purged arrays: {', '.join(others)}",
            todo=f"wait until they have finished, or omit --now: the bytes are overwritten {GRACE_S / 3600:g} hours after the purge",
        )
    database.run("retire_unnamed_ranges", uris=[file.uri for file in buffer.segments.files() if file.is_ours])
    due = database.fetch("ranges_to_erase", grace_s=0.0 if now else GRACE_S)
    failed: RftError | None = None
    for row in due:
        try:
            buffer.segments.erase(row["uri"], row["offset_bytes"], row["length_bytes"])
        except RftError as error:  # the other ranges must not wait for this one
            failed = failed or error
            continue
        database.run("range_is_erased", retired_range_id=row["retired_range_id"])
    if failed is not None:
        raise failed
    # Compaction leaves copies too: files that it retired, and copies that it had not committed when it was killed.
    Compactor(database, buffer.segments, grace_s=0.0 if now else buffer.config.compaction_grace_s, alone=now).clear()
    left = database.fetch("ranges_left")[0]
    return ErasureResult(len(due), sum(row["length_bytes"] for row in due), left["ranges"], left["num_bytes"])


def _others(buffer: Buffer) -> list[str]:
    """Return the names of other sessions; the server still lists a session for a moment after it was closed."""
    deadline = time.monotonic() + _CLOSING_S
    while True:
        rows = buffer.database.fetch("sessions_in_database", own_pids=buffer.database.own_pids())
        if not rows or time.monotonic() >= deadline:
            return [str(row["application_name"] or "unnamed") for row in rows]
        time.sleep(0.05)
