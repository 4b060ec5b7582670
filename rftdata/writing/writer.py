"""Writing of sealed groups: arrays to a segment and all rows in one transaction, which commits once the arrays are durable.

A write batch has a receipt, created before its first try, so that a retry after a lost answer inserts nothing. Groups that an
explorer claimed are written under their claim token: a writer whose claim passed to another worker gets `FencedError`, and
nothing of its batch is stored. Ids are taken from the sequences first, so that rows are sent by binary COPY while a helper thread
encodes, writes and flushes the arrays. The two take about as long.
"""

from __future__ import annotations

import queue
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

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
from rftdata.postgres.values import storable
from rftdata.segments.base import Appended, SegmentStore
from rftdata.segments.codec import encode
from rftdata.writing import origins
from rftdata.writing.prompts import Prompts

# The pipeline version of runs without stages. A complete group is drawable as soon as it is written.
NO_PIPELINE = "none"
_RETRIES = 5
_RETRY_AFTER_S = 0.5


@dataclass
class _Request:
    """Groups that one caller wants stored together, and the future for the answer."""

    groups: tuple[Group, ...]
    receipt: uuid.UUID | None = None
    answer: Future[list[int]] = field(default_factory=Future)

    @property
    def sequences(self) -> Iterator[Sequence]:
        return (sequence for group in self.groups for rollout in group.rollouts for sequence in rollout.sequences)

    def size(self) -> tuple[int, int]:
        """Return the number of experiences and their approximate number of bytes."""
        sizes = [
            9 * len(s.token_ids) + len(s.prompt) + len(s.response) + sum(a.nbytes for a in s.arrays.values())
            for s in self.sequences
        ]
        return len(sizes), sum(sizes)


@dataclass
class _Ids:
    """The ids that the database assigned to a batch, kept over retries to recognise a lost answer; empty if an earlier caller stored
    the batch."""

    groups: dict[int, int] = field(default_factory=dict)


class Writer:
    """Writes groups of one run; threads may share it.

    A dedicated thread stores the groups that callers submit. Groups that arrive while it works are stored together by the next transaction
    (group commit), so many callers cost few flushes, and a single caller does not wait.

    Args:
        max_rows, max_bytes: limits of experiences and bytes beyond which a transaction takes no further request.
        linger_ms: how long to wait for more groups before storing a smaller batch.
    """

    def __init__(
        self, database: Database, store: SegmentStore, run_id: int, *, max_rows: int = 2048, max_bytes: int = 128 * 2**20,
        linger_ms: float = 0.0,
    ) -> None:  # fmt: skip
        self._database = database
        self._appender = store.appender()
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="writer-arrays")
        self._max_rows, self._max_bytes, self._linger_s = max_rows, max_bytes, linger_ms / 1000
        self._requests: queue.Queue[_Request | None] = queue.Queue()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self.run_id = run_id

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Store everything submitted, then stop."""
        with self._lock:
            self._closed.set()
            thread, self._thread = self._thread, None
        if thread is not None:
            self._requests.put(None)
            thread.join()
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
            RftError: rows cannot be stored (lengths do not match, or a reward is not a finite number).
        """
        return self.submit(*groups, receipt=receipt).result()

    def submit(self, *groups: Group, receipt: uuid.UUID | None = None) -> Future[list[int]]:
        """Submit groups without waiting; the future has the result or error of `insert`.

        Raises:
            RftError: rows cannot be stored, or the writer is closed.
        """
        validate(groups)
        request = _Request(groups, receipt)
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
        requests, (rows, num_bytes) = [first], first.size()
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
            rows, num_bytes = (total + part for total, part in zip((rows, num_bytes), more.size(), strict=True))
        return requests, None

    def _answer(self, requests: list[_Request]) -> None:
        try:
            found = self._store(requests)
        except RftError:
            if len(requests) == 1:
                raise
            # One request caused it (a lost claim, for example), so each is stored separately.
            for request in requests:
                try:
                    request.answer.set_result(self._store([request])[0])
                except RftError as error:
                    request.answer.set_exception(error)
            return
        for request, ids in zip(requests, found, strict=True):
            request.answer.set_result(ids)

    def _store(self, requests: list[_Request]) -> list[list[int]]:
        """Store requests in one transaction; return the group ids of each."""
        groups = [group for request in requests for group in request.groups]
        sequences = [sequence for request in requests for sequence in request.sequences]
        ids = self._write_once(groups, sequences, requests[0].receipt or uuid.uuid4())
        if not ids:
            return [[] for _ in requests]
        failpoint("writer.committed")
        self._helper.submit(notify.notify, self._database, notify.SEALED, notify.READY)
        places = iter(ids)
        return [[next(places) for _ in request.groups] for request in requests]

    def _store_arrays(self, sequences: list[Sequence]) -> Appended:
        """Encode the arrays and make them durable, while the rows are sent."""
        appended = self._appender.append(encode(sequences))
        failpoint("writer.appended")
        self._appender.sync()
        return appended

    def _write_once(self, groups: list[Group], sequences: list[Sequence], receipt: uuid.UUID) -> list[int]:
        """Write under one receipt, with retries while the database is unreachable; no ids if the receipt was known before."""
        given = _Ids()
        arrays = self._helper.submit(self._store_arrays, sequences) if sequences else None
        try:
            for last_try in [False] * _RETRIES + [True]:
                try:
                    with self._database.transaction() as connection:
                        self._write(connection, groups, arrays, receipt, given)
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
                    if no_arrays or last_try or self._closed.wait(_RETRY_AFTER_S):
                        raise
        finally:
            if arrays is not None:
                wait([arrays])  # whatever happened to the rows, because the next batch appends after this one
        return [given.groups[id(group)] for group in groups] if given.groups else []

    def _write(
        self,
        connection: Connection,
        groups: list[Group],
        arrays: Future[Appended] | None,
        receipt: uuid.UUID,
        given: _Ids,
    ) -> None:
        rollouts = [(group, rollout) for group in groups for rollout in group.rollouts]
        experiences = [(g, r, turn, s) for g, r in rollouts for turn, s in enumerate(r.sequences)]
        unplanned = [group for group in groups if group.group_id is None]
        claimed = [group for group in groups if group.group_id is not None]
        with connection.pipeline():  # one round trip
            send(connection, "plan_by_index")
            # First of all: if an earlier try of this batch is still being committed, this waits for its end.
            new = send(
                connection, "insert_receipt", receipt=receipt, run_id=self.run_id, num_groups=len(groups),
                num_experiences=len(experiences),
            )  # fmt: skip
            run = send(connection, "pipeline_of_run", run_id=self.run_id)
            held = send(
                connection, "lock_claimed_groups", group_ids=[g.group_id for g in claimed],
                claim_tokens=[g.claim_token for g in claimed],
            ) if claimed else None  # fmt: skip
            reserved = send(
                connection, "reserve_ids", groups=len(unplanned), rollouts=len(rollouts), experiences=len(experiences)
            )
        if not new.rowcount:
            raise psycopg.Rollback  # the answer of an earlier try was lost, and `given` has the ids that it stored
        if held is not None:
            _check_held(claimed, held.fetchall())
        ids = one(reserved)
        given.groups = {id(g): int(g.group_id or 0) for g in claimed}
        given.groups |= {id(g): group_id for g, group_id in zip(unplanned, ids["groups"], strict=True)}
        numbered = self._copy_rows(connection, groups, rollouts, experiences, ids, given)
        origins.store(connection, self.run_id, [(given.groups[id(g)], g.origin) for g in groups if g.origin], numbered)
        with connection.pipeline():
            if unplanned:
                self._adopt(connection, unplanned, ids["groups"])
            self._seal(connection, groups, given, direct=one(run)["pipeline_version"] == NO_PIPELINE)
        appended = arrays.result() if arrays is not None else None  # nothing commits before they are durable
        failpoint("writer.synced")
        if appended and not self._insert_segment(connection, appended, ids["segment"]).rowcount:
            raise SegmentFileClosedError(
                f"the segment file {appended.uri} was closed before this writer committed to it",
                todo="write again: the arrays go to a new file",
            )

    def _copy_rows(
        self, connection: Connection, groups: list[Group], rollouts: list[tuple[Group, Rollout]],
        experiences: list[tuple[Group, Rollout, int, Sequence]], ids: Row, given: _Ids,
    ) -> list[tuple[int, Sequence]]:  # fmt: skip
        """Send the rows of rollouts, experiences and prompts; the experiences with their ids."""
        rollout_ids = {id(rollout): i for (_, rollout), i in zip(rollouts, ids["rollouts"], strict=True)}
        copy_bytes(
            connection, "rft.rollout", ROLLOUT_COLUMNS,
            (rollout_row(rollout_ids[id(r)], given.groups[id(g)], r) for g, r in rollouts),
        )  # fmt: skip
        numbered = [(i, s) for i, (_, _, _, s) in zip(ids["experiences"], experiences, strict=True)]
        parents = origins.parents_of(
            connection,
            self.run_id,
            [(i, g, s) for i, (g, _, _, s) in zip(ids["experiences"], experiences, strict=True)],
        )
        prompts = Prompts()
        texts = (
            fields for g in groups for fields in prompts.of_group(given.groups[id(g)], [s for r in g.rollouts for s in r.sequences])
        )  # fmt: skip
        copy_bytes(
            connection, "rft.experience", EXPERIENCE_COLUMNS,
            (
                experience_row(i, self.run_id, given.groups[id(g)], rollout_ids[id(r)], ids["segment"], row, g.source, turn, s, fields,
                               parents.get(g.origin.buffer_id, {}) if g.origin else {})
                for row, (i, (g, r, turn, s), fields) in enumerate(zip(ids["experiences"], experiences, texts, strict=True))
            ),
        )  # fmt: skip
        copy_bytes(connection, "rft.group_prompt", GROUP_PROMPT_COLUMNS, prompts.rows)
        return numbered

    def _seal(self, connection: Connection, groups: list[Group], given: _Ids, *, direct: bool) -> None:
        """Seal the groups: they go to the pipeline, or, complete and without a pipeline, to the trainer."""
        group_ids = [given.groups[id(group)] for group in groups]
        # An answer written by a stage is no outcome of the policy on the task.
        tried = [group for group in groups if group.source != "synthesis"]
        seen = [successes_and_trials(group) for group in tried]
        ready = [i for i, group in zip(group_ids, groups, strict=True) if direct and is_complete(group)]
        sealed = sorted(set(group_ids) - set(ready))
        send(
            connection, "observe_groups", group_ids=[given.groups[id(group)] for group in tried],
            successes=[float(s) for s, _ in seen], trials=[t for _, t in seen],
        )  # fmt: skip
        baselines = [(given.groups[id(group)], group.baseline) for group in groups if group.baseline is not None]
        if baselines:
            send(
                connection, "insert_baselines", group_ids=[group_id for group_id, _ in baselines],
                baselines=[Jsonb(storable(vars(baseline))) for _, baseline in baselines],
            )  # fmt: skip
        send(connection, "forget_partial_tokens", group_ids=group_ids)
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
            connection, "adopt_groups", run_id=self.run_id, group_ids=group_ids, tasksets=[storable(g.taskset) for g in groups],
            task_keys=[storable(g.task_key) for g in groups], payloads=[Jsonb(storable(g.payload)) for g in groups],
            sizes=[len(g.rollouts) for g in groups], sources=[g.source for g in groups],
        )  # fmt: skip

    def _insert_segment(self, connection: Connection, appended: Appended, segment_id: int) -> Cursor:
        return send(
            connection, "insert_segment", segment_id=segment_id, uri=appended.uri, offset_bytes=appended.offset_bytes,
            length_bytes=appended.length_bytes, num_rows=appended.num_rows, checksum=appended.checksum,
        )  # fmt: skip


def _check_held(groups: list[Group], rows: list[Row]) -> None:
    sizes = {row["group_id"]: row["group_size"] for row in rows}
    for group in groups:
        if group.group_id not in sizes:
            raise FencedError(
                f"group {group.group_id} is no longer held by this worker",
                todo="discard the result: another worker samples the group again",
            )
        if len(group.rollouts) != sizes[group.group_id]:
            raise RftError(
                f"group {group.group_id} has another number of rollouts than planned", value=len(group.rollouts),
                allowed=str(sizes[group.group_id]), todo="record failed rollouts with their outcome",
            )  # fmt: skip
