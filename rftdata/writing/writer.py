"""Writing of sealed groups: arrays to a segment and all rows in one transaction, which commits once the arrays are durable.

A write batch has a receipt, created before its first try, so that a retry after a lost answer inserts nothing. Requests of several callers
that were to be stored together are stored separately only if it is certain that the joint transaction was rolled back. Groups that an
explorer claimed are written under their claim token: a writer whose claim passed to another worker gets `FencedError`, and
nothing of its batch is stored. Ids are taken from the sequences first, so that rows are sent by binary COPY while a helper thread
encodes, writes and flushes the arrays. The two take about as long.
"""

from __future__ import annotations

import queue
import struct
import threading
import time
import uuid
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import islice

import psycopg
from psycopg.types.json import Jsonb

from rftdata.errors import BufferUnavailableError, ConflictError, FencedError, RftError, SegmentFileClosedError
from rftdata.experience import Group, Rollout, Sequence, is_complete, successes_and_trials, validate
from rftdata.failpoints import failpoint
from rftdata.postgres import notify
from rftdata.postgres.binary_copy import (
    EXPERIENCE_COLUMNS,
    GROUP_PROMPT_COLUMNS,
    ROLLOUT_COLUMNS,
    copy_bytes,
    experience_row,
    rollout_row,
)
from rftdata.postgres.database import Connection, Cursor, Database, Row, one, send
from rftdata.postgres.retry import is_outage, proves_rollback
from rftdata.postgres.values import storable
from rftdata.segments.base import Appended, SegmentStore
from rftdata.segments.codec import encode
from rftdata.writing import origins
from rftdata.writing.prompts import Prompts

# The pipeline version of runs without stages. A complete group is drawable as soon as it is written.
NO_PIPELINE = "none"
_RETRIES = 5
_RETRY_AFTER_S = 0.5
# Errors of values that cannot be encoded, or that the database does not accept. `struct.error` has no better base.
_UNSTORABLE = (
    TypeError,
    ValueError,
    ArithmeticError,
    AttributeError,
    LookupError,
    struct.error,
    psycopg.DataError,
    psycopg.IntegrityError,
    psycopg.ProgrammingError,
)


@dataclass
class _Request:
    """Groups that one caller wants stored together, and the future for the answer.

    Attributes:
        rows, num_bytes: the number of experiences and their approximate number of bytes.
    """

    groups: tuple[Group, ...]
    receipt: uuid.UUID | None
    rows: int
    num_bytes: int
    answer: Future[list[int]] = field(default_factory=Future)


@dataclass
class _Batch:
    """Groups that one transaction stores, with what is known of it over its retries.

    Attributes:
        group_ids: ids that the newest try assigned, in order of the groups. If a later try finds the receipt, these were stored; empty if an
            earlier caller stored the batch.
        is_undecided: whether a try may have been committed, or may still be: its COMMIT was sent, and the answer was lost. A later try that
            finds no receipt proves that it was not.
    """

    groups: list[Group]
    receipt: uuid.UUID
    group_ids: list[int] = field(default_factory=list)
    is_undecided: bool = False

    @property
    def sequences(self) -> list[Sequence]:
        return [sequence for group in self.groups for rollout in group.rollouts for sequence in rollout.sequences]


class Writer:
    """Writes groups of one run; threads may share it.

    A dedicated thread stores the groups that callers submit. Groups that arrive while it works are stored together by the next transaction
    (group commit), so many callers cost few flushes, and a single caller does not wait.

    Args:
        max_rows, max_bytes: limits of experiences and bytes beyond which a transaction takes no further request.
        linger_ms: how long to wait for more groups before storing a smaller batch.
    """

    def __init__(
        self,
        database: Database,
        store: SegmentStore,
        run_id: int,
        *,
        max_rows: int = 2048,
        max_bytes: int = 128 * 2**20,
        linger_ms: float = 0.0,
    ) -> None:
        self._database = database
        self._appender = store.appender()
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="writer-arrays")
        self._max_rows, self._max_bytes, self._linger_s = max_rows, max_bytes, linger_ms / 1000
        self._requests: queue.Queue[_Request | None] = queue.Queue()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock, self._closing = threading.Lock(), threading.Lock()
        self.run_id = run_id

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Store everything submitted, then stop. Every call returns only after that, whichever thread makes it and however often."""
        with self._lock:
            if self._thread is not None and not self._closed.is_set():
                self._requests.put(None)
            self._closed.set()
        if self._thread is not None:
            self._thread.join()
        with self._closing:
            self._helper.shutdown()
            self._appender.close()

    def insert(self, *groups: Group, receipt: uuid.UUID | None = None) -> list[int]:
        """Store whole groups; return their ids once rows and arrays are durable.

        Args:
            receipt: chosen by the caller, for groups that may have been stored before. If the receipt is known, nothing is
                stored and the list is empty. These groups get a separate transaction.

        Raises:
            FencedError: a group's claim passed to another worker; nothing was stored.
            DiskFullError: there is no room; nothing was stored.
            BufferUnavailableError: the database did not answer. The groups may have been stored, unless the error says otherwise; a caller that
                writes them again chooses a receipt.
            RftError: rows cannot be stored (lengths do not match, or a reward is not a finite number).
        """
        return self.submit(*groups, receipt=receipt).result()

    def submit(self, *groups: Group, receipt: uuid.UUID | None = None) -> Future[list[int]]:
        """Submit groups without waiting; the future has the result or error of `insert`.

        Raises:
            RftError: rows cannot be stored, or the writer is closed.
        """
        try:
            validate(groups)
            sizes = [_size(s) for group in groups for rollout in group.rollouts for s in rollout.sequences]
        except Exception as error:
            raise _refusal(list(groups), error) from error
        request = _Request(groups, receipt, len(sizes), sum(sizes))
        with self._lock:
            if self._closed.is_set():
                raise RftError("the writer is closed", todo="open a new one: buffer.writer(run)")
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="writer", daemon=True)
                self._thread.start()
            self._requests.put(request)
        return request.answer

    def _work(self) -> None:
        early: _Request | None = None
        while (first := early or self._requests.get()) is not None:
            requests, early = self._gather(first)
            try:
                self._answer(requests)
            except BaseException as error:  # noqa: BLE001 - every error belongs to the waiting callers
                for request in requests:
                    if not request.answer.done():
                        request.answer.set_exception(error)

    def _gather(self, first: _Request) -> tuple[list[_Request], _Request | None]:
        """Return the first request and others to store with it, and a request that was taken too early and comes next."""
        requests, rows, num_bytes = [first], first.rows, first.num_bytes
        deadline = time.monotonic() + self._linger_s
        while first.receipt is None and rows < self._max_rows and num_bytes < self._max_bytes:
            try:
                more = self._requests.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            if more is None:
                self._requests.put(None)  # the end mark, read again after this batch
                break
            if more.receipt is not None:
                return requests, more  # separate; put back into the queue it would be behind the end mark
            requests.append(more)
            rows, num_bytes = rows + more.rows, num_bytes + more.num_bytes
        return requests, None

    def _answer(self, requests: list[_Request]) -> None:
        """Store requests in one transaction. If that cannot be, each is stored separately, unless the transaction may have been committed."""
        groups = [group for request in requests for group in request.groups]
        batch = _Batch(groups, requests[0].receipt or uuid.uuid4())
        try:
            self._store(batch)
        except Exception as error:
            if batch.is_undecided:
                raise _unknown(groups) from error.__cause__ or error
            if len(requests) == 1:
                raise _refusal(groups, error) from error
            if isinstance(error, BufferUnavailableError) and is_outage(error):
                raise
            # One request caused it (a lost claim or a value that cannot be stored, for example).
            self._answer_separately(requests)
            return
        ids = iter(batch.group_ids)
        for request in requests:
            request.answer.set_result(list(islice(ids, len(request.groups))))

    def _answer_separately(self, requests: list[_Request]) -> None:
        for request in requests:
            try:
                self._answer([request])
            except Exception as error:  # noqa: BLE001 - every error belongs to its caller
                request.answer.set_exception(error)

    def _store(self, batch: _Batch) -> None:
        """Store a batch, with retries while the database is unreachable."""
        self._write_once(batch)
        if batch.group_ids:
            failpoint("writer.committed")
            self._helper.submit(notify.notify, self._database, notify.SEALED, notify.READY)

    def _store_arrays(self, sequences: list[Sequence]) -> Appended:
        """Encode the arrays and make them durable, while the rows are sent."""
        appended = self._appender.append(encode(sequences))
        failpoint("writer.appended")
        self._appender.sync()
        return appended

    def _write_once(self, batch: _Batch) -> None:
        sequences = batch.sequences
        arrays = self._helper.submit(self._store_arrays, sequences) if sequences else None
        try:
            for last_try in [False] * _RETRIES + [True]:
                try:
                    self._try(batch, arrays)
                    break
                except SegmentFileClosedError:
                    if last_try:
                        raise
                    # Silent for so long that a process on another host considered this writer dead: the arrays go to a new file.
                    self._appender.roll()
                    arrays = self._helper.submit(self._store_arrays, sequences)
                except (BufferUnavailableError, ConflictError):
                    # Arrays that could not be made durable stay so, because a failed flush must not be repeated.
                    no_arrays = arrays is not None and arrays.done() and arrays.exception() is not None
                    if no_arrays or last_try:
                        raise
                    time.sleep(_RETRY_AFTER_S)
        finally:
            if arrays is not None:
                wait([arrays])  # whatever happened to the rows, because the next batch appends after this one

    def _try(self, batch: _Batch, arrays: Future[Appended] | None) -> None:
        commits = False
        try:
            with self._database.transaction() as connection:
                self._write(connection, batch, arrays)
                commits = True
        except Exception as error:
            # The server's error concerns this try alone: an earlier one stays undecided.
            batch.is_undecided |= commits and not proves_rollback(error)
            if not batch.is_undecided:
                batch.group_ids = []  # nothing was stored under them, even if a later try finds the receipt
            raise
        batch.is_undecided = False

    def _write(self, connection: Connection, batch: _Batch, arrays: Future[Appended] | None) -> None:
        """Write a batch in a transaction; nothing if its receipt is known."""
        groups = batch.groups
        places = [(place, rollout) for place, group in enumerate(groups) for rollout in group.rollouts]
        num_experiences = sum(len(rollout.sequences) for _, rollout in places)
        unplanned = [group for group in groups if group.group_id is None]
        claimed = [group for group in groups if group.group_id is not None]
        with connection.pipeline():  # one round trip
            send(connection, "plan_by_index")
            # First of all: if an earlier try of this batch is still being committed, this waits for its end.
            new = send(
                connection,
                "insert_receipt",
                receipt=batch.receipt,
                run_id=self.run_id,
                num_groups=len(groups),
                num_experiences=num_experiences,
            )
            run = send(connection, "pipeline_of_run", run_id=self.run_id)
            held = (
                send(
                    connection,
                    "lock_claimed_groups",
                    group_ids=[g.group_id for g in claimed],
                    claim_tokens=[g.claim_token for g in claimed],
                )
                if claimed
                else None
            )
            reserved = send(
                connection, "reserve_ids", groups=len(unplanned), rollouts=len(places), experiences=num_experiences
            )
        if not new.rowcount:
            return  # the answer of an earlier try was lost
        batch.is_undecided = False
        if held is not None:
            _check_held(claimed, held.fetchall())
        ids = one(reserved)
        assigned = iter(ids["groups"])
        batch.group_ids = [next(assigned) if g.group_id is None else g.group_id for g in groups]
        numbered = self._copy_rows(connection, batch, places, ids)
        origins.store(
            connection,
            self.run_id,
            [(i, g.origin) for i, g in zip(batch.group_ids, groups, strict=True) if g.origin],
            numbered,
        )
        with connection.pipeline():
            if unplanned:
                self._adopt(connection, unplanned, ids["groups"])
            self._seal(connection, batch, direct=one(run)["pipeline_version"] == NO_PIPELINE)
        appended = arrays.result() if arrays is not None else None  # nothing commits before they are durable
        failpoint("writer.synced")
        if appended and not self._insert_segment(connection, appended, ids["segment"]).rowcount:
            raise SegmentFileClosedError(
                f"the segment file {appended.uri} was closed before this writer committed to it",
                todo="write again: the arrays go to a new file",
            )

    def _copy_rows(
        self, connection: Connection, batch: _Batch, places: list[tuple[int, Rollout]], ids: Row
    ) -> list[tuple[int, Sequence]]:
        """Send the rows of rollouts, experiences and prompts; the experiences with their ids.

        Args:
            places: rollouts with the places of their groups in the batch.
        """
        groups, group_ids = batch.groups, batch.group_ids
        copy_bytes(
            connection,
            "rft.rollout",
            ROLLOUT_COLUMNS,
            (rollout_row(i, group_ids[place], r) for i, (place, r) in zip(ids["rollouts"], places, strict=True)),
        )
        experiences = [
            (place, rollout_id, turn, s)
            for rollout_id, (place, rollout) in zip(ids["rollouts"], places, strict=True)
            for turn, s in enumerate(rollout.sequences)
        ]
        numbered = [(i, s) for i, (*_, s) in zip(ids["experiences"], experiences, strict=True)]
        parents = origins.parents_of(
            connection,
            self.run_id,
            [(i, groups[place], s) for i, (place, *_, s) in zip(ids["experiences"], experiences, strict=True)],
        )
        prompts = Prompts()
        texts = (
            fields
            for i, g in zip(group_ids, groups, strict=True)
            for fields in prompts.of_group(i, [s for r in g.rollouts for s in r.sequences])
        )
        copy_bytes(
            connection,
            "rft.experience",
            EXPERIENCE_COLUMNS,
            (
                experience_row(
                    i,
                    self.run_id,
                    group_ids[place],
                    rollout_id,
                    ids["segment"],
                    row,
                    g.source,
                    turn,
                    s,
                    fields,
                    parents.get(g.origin.buffer_id, {}) if g.origin else {},
                )
                for row, (i, (place, rollout_id, turn, s), fields) in enumerate(
                    zip(ids["experiences"], experiences, texts, strict=True)
                )
                for g in (groups[place],)
            ),
        )
        copy_bytes(connection, "rft.group_prompt", GROUP_PROMPT_COLUMNS, prompts.rows)
        return numbered

    def _seal(self, connection: Connection, batch: _Batch, *, direct: bool) -> None:
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

    def _adopt(self, connection: Connection, groups: list[Group], group_ids: list[int]) -> None:
        # Groups get their ordinals here, and other planners and writers of the run wait for that until this commits. By now the rows are
        # sent, and the arrays are being written to disk.
        send(connection, "allow_hash_joins")
        send(connection, "wait_for_plan_lock", run_id=self.run_id)
        send(
            connection,
            "adopt_groups",
            run_id=self.run_id,
            group_ids=group_ids,
            tasksets=[storable(g.taskset) for g in groups],
            task_keys=[storable(g.task_key) for g in groups],
            payloads=[Jsonb(storable(g.payload)) for g in groups],
            sizes=[len(g.rollouts) for g in groups],
            sources=[g.source for g in groups],
        )

    def _insert_segment(self, connection: Connection, appended: Appended, segment_id: int) -> Cursor:
        return send(
            connection,
            "insert_segment",
            segment_id=segment_id,
            uri=appended.uri,
            offset_bytes=appended.offset_bytes,
            length_bytes=appended.length_bytes,
            num_rows=appended.num_rows,
            checksum=appended.checksum,
        )


def _size(s: Sequence) -> int:
    return 9 * len(s.token_ids) + len(s.prompt) + len(s.response) + sum(a.nbytes for a in s.arrays.values())


def _unknown(groups: list[Group]) -> BufferUnavailableError:
    return BufferUnavailableError(
        f"whether {len(groups)} groups were stored is unknown: the database did not answer when they were committed, nor afterwards",
        todo="look for them before they are written again, or write with a receipt, under which groups are stored once",
    )


def _refusal(groups: list[Group], error: Exception) -> Exception:
    """Return the error of groups that cannot be stored."""
    if isinstance(error, RftError) or not isinstance(error, _UNSTORABLE):
        return error
    names = ", ".join(str(g.task_key if g.group_id is None else g.group_id) for g in groups[:3])
    return RftError(
        f"{'groups' if len(groups) > 1 else 'the group'} {names} cannot be stored: {type(error).__name__}: {' '.join(str(error).split())}",
        todo="correct the values; nothing was stored",
    )


def _check_held(groups: list[Group], rows: list[Row]) -> None:
    sizes = {row["group_id"]: row["group_size"] for row in rows}
    if len({group.group_id for group in groups}) < len(groups):
        raise RftError("a group is given twice", todo="write each group once")
    for group in groups:
        if group.group_id not in sizes:
            raise FencedError(
                f"group {group.group_id} is no longer held by this worker",
                todo="discard the result: another worker samples the group again",
            )
        if len(group.rollouts) != sizes[group.group_id]:
            raise RftError(
                f"group {group.group_id} has another number of rollouts than planned",
                value=len(group.rollouts),
                allowed=str(sizes[group.group_id]),
                todo="record failed rollouts with their outcome",
            )
