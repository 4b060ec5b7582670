"""Writing of sealed groups: what callers submit is stored by one thread, many groups in one commit.

Requests of several callers that were to be stored together are stored separately only if it is certain that the joint transaction was
rolled back. `rftdata.writing.batch_store` stores a batch.
"""

from __future__ import annotations

import queue
import threading
import time
import uuid
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice

from rftdata.errors import BufferUnavailableError, RftError
from rftdata.experience import Group, Sequence
from rftdata.experience_checks import validate
from rftdata.postgres.database import Database
from rftdata.postgres.retry import is_outage
from rftdata.segments.base import SegmentStore
from rftdata.writing.batch_store import BatchStore
from rftdata.writing.write_batch import WriteBatch, refusal, unknown_outcome


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
        segments: SegmentStore,
        run_id: int,
        *,
        max_rows: int = 2048,
        max_bytes: int = 128 * 2**20,
        linger_ms: float = 0.0,
    ) -> None:
        self._store = BatchStore(database, segments, run_id)
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
            self._store.close()

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
            raise refusal(list(groups), error) from error
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
        batch = WriteBatch(groups, requests[0].receipt or uuid.uuid4())
        try:
            self._store.store(batch)
        except Exception as error:
            if batch.is_undecided:
                raise unknown_outcome(groups) from error.__cause__ or error
            if len(requests) == 1:
                raise refusal(groups, error) from error
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


def _size(s: Sequence) -> int:
    return 9 * len(s.token_ids) + len(s.prompt) + len(s.response) + sum(a.nbytes for a in s.arrays.values())
