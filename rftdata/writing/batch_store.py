"""Storage of a write batch, in one direction: its arrays to a segment, its rows by COPY, one commit once the arrays are durable.

A batch has a receipt, created before its first try, so that a retry after a lost answer inserts nothing. Groups that an explorer claimed
are written under their claim token: if the claim passed to another worker, the batch gets `FencedError`, and nothing of it is stored. Ids
are taken from the sequences first, so that rows are sent while a helper thread encodes, writes and flushes the arrays. The two take about
as long.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence as Items
from concurrent.futures import Future, ThreadPoolExecutor, wait

from psycopg.types.json import Jsonb

from rftdata.errors import BufferUnavailableError, ConflictError, FencedError, RftError, SegmentFileClosedError
from rftdata.experience import Group, Sequence, is_complete, successes_and_trials
from rftdata.failpoints import failpoint
from rftdata.postgres import notify
from rftdata.postgres.database import Connection, Cursor, Database, Row, fetch, one, send
from rftdata.postgres.retry import proves_rollback
from rftdata.postgres.values import storable
from rftdata.run import NO_PIPELINE
from rftdata.segments.base import Appended, SegmentStore
from rftdata.segments.codec import encode
from rftdata.writing.batch_rows import copy_rows_of
from rftdata.writing.sources import check_sources, send_source_checks
from rftdata.writing.write_batch import WriteBatch

_RETRIES = 5
_RETRY_AFTER_S = 0.5


class BatchStore:
    """Stores the write batches of one run, one after the other; for one thread.

    Attributes:
        appender: the segment file of this writer.
    """

    def __init__(self, database: Database, segments: SegmentStore, run_id: int) -> None:
        self._database = database
        self._segments = segments
        self._run_id = run_id
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="writer-arrays")
        self.appender = segments.appender()

    def close(self) -> None:
        """Close the segment file."""
        self._helper.shutdown()
        self.appender.close()

    def store(self, batch: WriteBatch) -> None:
        """Store a batch, with retries while the database is unreachable."""
        self._store_once(batch)
        if batch.group_ids:
            failpoint("writer.committed")
            self._helper.submit(notify.notify, self._database, notify.SEALED, notify.READY)

    def begin_arrays(self, sequences: list[Sequence]) -> Future[Appended] | None:
        """Let the helper thread encode arrays and make them durable; return None without sequences."""
        return self._helper.submit(self._store_arrays, sequences) if sequences else None

    def _store_arrays(self, sequences: list[Sequence]) -> Appended:
        appended = self.appender.append(encode(sequences))
        failpoint("writer.appended")
        self.appender.sync()
        return appended

    def _store_once(self, batch: WriteBatch) -> None:
        sequences = batch.sequences
        arrays = self.begin_arrays(sequences)
        try:
            for is_last in [False] * _RETRIES + [True]:
                try:
                    self.try_commit(batch, arrays)
                    break
                except SegmentFileClosedError:
                    if is_last:
                        raise
                    # This writer was silent for so long that a process on another host considered it dead: the arrays go to a new file.
                    self.appender.roll()
                    arrays = self.begin_arrays(sequences)
                except (BufferUnavailableError, ConflictError):
                    # Arrays that could not be made durable stay so, because a failed flush must not be repeated.
                    no_arrays = arrays is not None and arrays.done() and arrays.exception() is not None
                    if no_arrays or is_last:
                        raise
                    time.sleep(_RETRY_AFTER_S)
        except Exception:
            if arrays is not None and not batch.is_undecided:
                self._erase(arrays)
            raise
        finally:
            if arrays is not None:
                wait([arrays])  # whatever happened to the rows, because the next batch appends after this one

    def _erase(self, arrays: Future[Appended]) -> None:
        """Overwrite arrays that no row will name: they may be of a task that was purged, and a purge does not know them."""
        # If the arrays were not written, there is nothing to erase. If they cannot be overwritten, the next erasure does it.
        with contextlib.suppress(RftError, OSError):
            appended = arrays.result()
            self._segments.erase(appended.uri, appended.offset_bytes, appended.length_bytes)

    def try_commit(self, batch: WriteBatch, arrays: Future[Appended] | None) -> None:
        """Write a batch in one transaction, and record in it whether the outcome is known."""
        commits = False
        try:
            with self._database.transaction() as connection:
                self.write(connection, batch, arrays)
                commits = True
        except Exception as error:
            # The server's error concerns this try alone: an earlier one stays undecided.
            batch.is_undecided |= commits and not proves_rollback(error)
            if not batch.is_undecided:
                batch.group_ids = []  # nothing was stored under them, even if a later try finds the receipt
            raise
        batch.is_undecided = False

    def write(self, connection: Connection, batch: WriteBatch, arrays: Future[Appended] | None) -> None:
        """Write a batch in the caller's transaction; nothing if its receipt is known."""
        unplanned = [group for group in batch.groups if group.group_id is None]
        claimed = [group for group in batch.groups if group.group_id is not None]
        with connection.pipeline():  # one round trip
            send(connection, "plan_by_index")
            # First of all: if an earlier try of this batch is still being committed, this waits for its end.
            new = send(connection, "insert_receipt", receipt=batch.receipt, run_id=self._run_id)
            run = send(connection, "pipeline_of_run", run_id=self._run_id)
            sources = send_source_checks(connection, batch)
            held = _lock_claimed(connection, self._run_id, claimed) if claimed else None
            reserved = send(
                connection,
                "reserve_ids",
                groups=len(unplanned),
                rollouts=len(batch.rollouts),
                experiences=len(batch.sequences),
            )
        if not new.rowcount:
            return  # the answer of an earlier try was lost
        batch.is_undecided = False
        check_sources(sources)
        if held is not None:
            _check_held(connection, self._run_id, claimed, held.fetchall())
        ids = one(reserved)
        assigned = iter(ids["groups"])
        batch.group_ids = [next(assigned) if g.group_id is None else g.group_id for g in batch.groups]
        copy_rows_of(connection, self._run_id, batch, ids)
        with connection.pipeline():
            if unplanned:
                _adopt(connection, self._run_id, unplanned, ids["groups"])
            _seal(connection, batch, direct=one(run)["pipeline_version"] == NO_PIPELINE)
        appended = arrays.result() if arrays is not None else None  # nothing commits before they are durable
        failpoint("writer.synced")
        if appended is not None:
            _insert_segment(connection, appended, ids["segment"])


def _lock_claimed(connection: Connection, run_id: int, groups: Items[Group]) -> Cursor:
    return send(
        connection,
        "lock_claimed_groups",
        run_id=run_id,
        group_ids=[group.group_id for group in groups],
        claim_tokens=[group.claim_token for group in groups],
    )


def _check_held(connection: Connection, run_id: int, groups: Items[Group], rows: Items[Row]) -> None:
    sizes = {row["group_id"]: row["group_size"] for row in rows}
    if len({group.group_id for group in groups}) < len(groups):
        raise RftError("a group is given twice", todo="write each group once")
    for group in groups:
        if group.group_id not in sizes:
            raise _not_held(connection, run_id, group)
        if len(group.rollouts) != sizes[group.group_id]:
            raise RftError(
                f"group {group.group_id} has another number of rollouts than planned",
                value=len(group.rollouts),
                allowed=str(sizes[group.group_id]),
                todo="record failed rollouts with their outcome",
            )


def _not_held(connection: Connection, run_id: int, group: Group) -> RftError:
    for row in fetch(connection, "group_of_write", group_id=group.group_id):
        if row["run_id"] != run_id:
            return RftError(
                f"group {group.group_id} belongs to the run {row['run']!r}, and this writer writes into another one",
                value=run_id,
                allowed=str(row["run_id"]),
                todo="write it with a writer of its run: buffer.writer(run)",
            )
        if row["is_purged"]:
            return FencedError(
                f"the task of group {group.group_id} was purged while the group was sampled", todo="discard the result"
            )
    return FencedError(
        f"group {group.group_id} is no longer held by this worker",
        todo="discard the result: another worker samples the group again",
    )


def _adopt(connection: Connection, run_id: int, groups: Items[Group], group_ids: list[int]) -> None:
    """Plan groups that no planner planned.

    They get their ordinals here, and other planners and writers of the run wait for that until this commits. By now the rows are sent, and
    the arrays are being written to disk.
    """
    send(connection, "allow_hash_joins")
    send(connection, "wait_for_plan_lock", run_id=run_id)
    send(
        connection,
        "adopt_groups",
        run_id=run_id,
        group_ids=group_ids,
        tasksets=[storable(g.taskset) for g in groups],
        task_keys=[storable(g.task_key) for g in groups],
        payloads=[Jsonb(storable(g.payload)) for g in groups],
        sizes=[len(g.rollouts) for g in groups],
        sources=[g.source for g in groups],
    )


def _seal(connection: Connection, batch: WriteBatch, *, direct: bool) -> None:
    """Seal the groups: they go to the pipeline, or, complete and without a pipeline, to the trainer."""
    groups = list(zip(batch.group_ids, batch.groups, strict=True))
    # An answer written by a stage is no outcome of the policy on the task.
    tried = [(i, successes_and_trials(group)) for i, group in groups if group.source != "synthesis"]
    ready = [i for i, group in groups if direct and is_complete(group)]
    sealed = sorted(set(batch.group_ids) - set(ready))
    send(
        connection,
        "observe_groups",
        group_ids=[i for i, _ in tried],
        successes=[float(s) for _, (s, _) in tried],
        trials=[t for _, (_, t) in tried],
    )
    baselines = [(i, group.baseline) for i, group in groups if group.baseline is not None]
    if baselines:
        send(
            connection,
            "insert_baselines",
            group_ids=[group_id for group_id, _ in baselines],
            baselines=[Jsonb(storable(vars(baseline))) for _, baseline in baselines],
        )
    send(connection, "forget_partial_tokens", group_ids=batch.group_ids)
    if sealed:
        send(connection, "seal_groups", group_ids=sealed)
    if ready:
        send(connection, "ready_groups", group_ids=ready, priorities=[0.0] * len(ready))


def _insert_segment(connection: Connection, appended: Appended, segment_id: int) -> None:
    inserted = send(
        connection,
        "insert_segment",
        segment_id=segment_id,
        uri=appended.uri,
        offset_bytes=appended.offset_bytes,
        length_bytes=appended.length_bytes,
        num_rows=appended.num_rows,
        checksum=appended.checksum,
    )
    if not inserted.rowcount:
        raise SegmentFileClosedError(
            f"the segment file {appended.uri} was closed before this writer committed to it",
            todo="write again: the arrays go to a new file",
        )
