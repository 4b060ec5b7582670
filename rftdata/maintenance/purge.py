"""Permanent removal of texts and arrays. The experience's row stays with its ids, counts and rewards, and a row that records why.

Which experiences are purged is decided again after every wait: for other purges and compactions, and for the locks of their rows.

Stored facts change in no other way. Segment by segment, the record batch is written again without the rows' values and made durable. One
transaction then empties the texts, moves the segment, abandons the groups and writes the audit. If the process is killed at any point,
each experience is either whole or purged, and the same command continues. Addresses of rows never change.

A purge and a compaction exclude each other: neither copies what the other moves, so no unrecorded copy of a purged row remains.

The old bytes are overwritten later (`rftdata.maintenance.erasure`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal, Protocol

from rftdata.buffer import Buffer
from rftdata.errors import ArchivedError, BufferUnavailableError, ConflictError, QueryError, RftError
from rftdata.maintenance.conditions import chosen
from rftdata.maintenance.unanswered_tasks import purge_unanswered, unanswered_tasks
from rftdata.postgres.database import Connection, Row, execute, fetch
from rftdata.segments.base import SegmentAddress, SegmentAppender
from rftdata.segments.codec import emptied
from rftdata.segments.compaction import Move, commit_moves, lock_moves
from rftdata.segments.posix import PosixSegmentStore

_CHUNK_SEGMENTS = 64
_CHUNK_BYTES = 256 * 2**20
_CHUNK_TASKS = 1000
# Longest wait for a compaction or another purge.
_WAIT_S = 600.0


@dataclass(frozen=True)
class PurgeResult:
    """The result of a purge, or with `dry_run` the expected one.

    Attributes:
        purge_id: key of its row in `rft.purge`; None if nothing was written.
        num_purged_before: chosen experiences that an earlier purge had emptied.
        num_tasks: tasks that still have a prompt.
        num_unanswered_tasks: tasks without an experience that met the condition and were purged.
        made_experiences, made_tasks: what stages created from them. It keeps its texts and needs a separate purge. Empty for retention.
    """

    purge_id: int | None
    num_experiences: int
    num_purged_before: int
    num_tasks: int
    made_experiences: tuple[int, ...] = ()
    made_tasks: tuple[int, ...] = ()
    num_unanswered_tasks: int = 0


def purge(
    buffer: Buffer,
    where: str,
    *,
    reason: str,
    author: str,
    runs: Sequence[str] = (),
    tasks_too: bool = False,
    dry_run: bool = False,
    tries: int = 5,
) -> PurgeResult:
    """Purge the experiences that meet a condition.

    Args:
        where: over `rft.v_experience`.
        reason, author: stored permanently.
        tasks_too: also empty the tasks of these experiences and answers to them in evaluations. These tasks are never selected again. Without
            `runs`, tasks without an experience that meet the condition are among them.
        tries: number of times each part is tried if it conflicts with other transactions.

    Raises:
        ArchivedError: the run of an experience is archived.
        QueryError: there is no reason, the condition is invalid, or no experience meets it.
        RftError: a trainer is reading one of them; parts purged before it stay purged.
    """
    if not reason.strip():
        raise QueryError("a purge needs a reason", todo="give one with --reason: it is the only record that stays")
    choice = _Condition(buffer, where, [buffer.find_run(name).run_id for name in runs] or None)
    unanswered = unanswered_tasks(buffer, where) if tasks_too and not runs else []
    if not unanswered and not choice.choose():
        raise QueryError("no experience meets the condition", value=where, todo="nothing was purged")
    order = PurgeOrder("request", where, reason.strip(), author, tasks_too)
    purge_id = None
    if unanswered and not dry_run:
        # First, so that an answer that is stored meanwhile is found as an experience. `purge_chosen` continues this purge.
        purge_id = int(buffer.database.fetch("begin_purge", **vars(order))[0]["purge_id"])
        purge_unanswered(buffer, purge_id, unanswered)
    done = purge_chosen(buffer, choice, order, dry_run=dry_run, tries=tries)
    return replace(done, purge_id=done.purge_id or purge_id, num_unanswered_tasks=len(unanswered))


class Choice(Protocol):
    """Which experiences are purged, decided again whenever the purge has waited."""

    def choose(self) -> list[int]:
        """Return the experiences to purge, as of now."""

    def confirm(self, connection: Connection, ids: Sequence[int], changed: Sequence[int]) -> list[int]:
        """Return which of some experiences are still to be purged, once their rows are locked.

        Args:
            connection: of the transaction that holds the locks.
            changed: those of which the row was changed since they were chosen.
        """


@dataclass(frozen=True)
class _Condition:
    """Experiences that meet a condition."""

    buffer: Buffer
    where: str
    run_ids: list[int] | None

    def choose(self) -> list[int]:
        return self._among(None)

    def confirm(self, connection: Connection, ids: Sequence[int], changed: Sequence[int]) -> list[int]:
        # Only those: the purge itself may change what a condition finds in other rows.
        gone = set(changed) - set(self._among(changed)) if changed else set()
        return [i for i in ids if i not in gone]

    def _among(self, ids: Sequence[int] | None) -> list[int]:
        with self.buffer.database.reading() as connection:
            return [experience_id for _, experience_id in chosen(connection, self.where, self.run_ids, ids)]


@dataclass(frozen=True)
class PurgeOrder:
    """Why and for whom experiences are purged; its fields are columns of `rft.purge`.

    Attributes:
        kind: `request` or `retention`. A request also purges the copies of the experiences, and refuses archived runs.
        selection: the condition or the rule.
        tasks_too: also empty the tasks of these experiences.
    """

    kind: Literal["request", "retention"]
    selection: str
    reason: str
    author: str
    tasks_too: bool = False


def purge_chosen(
    buffer: Buffer, choice: Choice, order: PurgeOrder, *, dry_run: bool = False, tries: int = 5
) -> PurgeResult:
    """Purge experiences of a choice; see `purge`.

    Retention leaves archived runs alone.

    Copies of an experience in other runs may share its arrays, and have its texts. A request purges the copies too. Retention keeps
    experiences that have copies, since another run may still need them.
    """
    expected, _, _ = _plan(buffer, choice, order)
    if dry_run:
        return expected
    if not _is_work(expected, order):
        buffer.database.run("finish_interrupted_purge", **vars(order))
        return expected
    with lock_moves(buffer.database, wait_s=_WAIT_S) as is_held:
        if not is_held:
            raise ConflictError(
                f"another process has been compacting or purging this buffer for {_WAIT_S:g} s",
                todo="run it again when that process has finished; nothing was purged",
            )
        # Meanwhile rows may have been labelled, compared, archived, purged, or a run resumed.
        expected, candidates, purged_before = _plan(buffer, choice, order)
        if not _is_work(expected, order):
            buffer.database.run("finish_interrupted_purge", **vars(order))
            return expected
        purge_id = int(buffer.database.fetch("begin_purge", **vars(order))[0]["purge_id"])
        done, chosen = 0, {*purged_before, *(row["experience_id"] for row in candidates)}
        # The purge changes what the condition may name of the others, such as their states, and those were not chosen.
        beside = _experiences_beside(buffer, chosen) if order.tasks_too else set()
        with contextlib.closing(_appender(buffer)) as appender:
            while candidates:
                versions = {row["experience_id"]: row["version"] for row in candidates}
                chunk = _Chunk(buffer, choice, order, purge_id, versions)
                done += sum(_purge_chunk(chunk, appender, ids, tries) for ids in _chunks(candidates))
                # Until their tasks were purged, explorers may have stored further answers that were chosen.
                later = _plan(buffer, choice, order)[1] if order.tasks_too else []
                candidates = [row for row in later if row["experience_id"] not in beside]
                chosen |= {row["experience_id"] for row in candidates}
        if order.tasks_too:
            _purge_tasks(buffer, purge_id, purged_before)
    buffer.database.run("finish_purge", purge_id=purge_id)
    num_tasks = 0 if order.tasks_too else expected.num_tasks
    result = replace(expected, purge_id=purge_id, num_experiences=done, num_tasks=num_tasks)
    # Stages may have created something until the locks were taken.
    return _with_made(buffer, result, sorted(chosen), order)


def _experiences_beside(buffer: Buffer, experience_ids: Iterable[int]) -> set[int]:
    """Return all present experiences of the tasks of these ones."""
    rows = buffer.database.fetch("experiences_beside", experience_ids=list(experience_ids))
    return {row["experience_id"] for row in rows}


def _is_work(expected: PurgeResult, order: PurgeOrder) -> bool:
    return expected.num_experiences > 0 or (order.tasks_too and expected.num_tasks > 0)


def _purge_tasks(buffer: Buffer, purge_id: int, experience_ids: list[int]) -> None:
    """Purge the tasks of experiences that earlier purges had emptied."""
    for start in range(0, len(experience_ids), _CHUNK_TASKS):
        ids = experience_ids[start : start + _CHUNK_TASKS]
        buffer.database.fetch("purge_texts", experience_ids=ids, purge_id=purge_id, tasks_too=True)


def _plan(buffer: Buffer, choice: Choice, order: PurgeOrder) -> tuple[PurgeResult, list[Row], list[int]]:
    """Return the expected result of a purge as of now, the experiences that are not purged yet, and the chosen ones that are."""
    ids = choice.choose()
    copies = buffer.database.fetch("sharers_of_arrays", experience_ids=ids)
    if order.kind == "request":
        ids = [*ids, *(row["experience_id"] for row in copies)]
        for row in buffer.database.fetch("archived_experiences_among", experience_ids=ids):
            raise ArchivedError(
                f"the run {row['run']!r} is archived: the texts and arrays of experience {row['experience_id']} are in its files",
                todo=f"bring it back first: `rft restore-run {row['run']}`; nothing was purged",
            )
    else:
        copied = {i for row in copies for i in row["shares_with"]}
        ids = [i for i in ids if i not in copied]
    candidates = buffer.database.fetch("purge_candidates", experience_ids=list(ids))
    num_tasks = int(buffer.database.fetch("tasks_of_purged", experience_ids=list(ids))[0]["num_tasks"])
    purged_before = sorted(set(ids) - {row["experience_id"] for row in candidates})
    expected = PurgeResult(None, len(candidates), len(purged_before), num_tasks)
    return _with_made(buffer, expected, ids, order), candidates, purged_before


def _with_made(buffer: Buffer, result: PurgeResult, ids: Sequence[int], order: PurgeOrder) -> PurgeResult:
    """Return the result of a request with what stages created from the experiences, as of now."""
    if order.kind != "request":
        return result
    (row,) = buffer.database.fetch("made_of_purged", experience_ids=list(ids), tasks_too=order.tasks_too)
    return replace(result, made_experiences=tuple(row["experience_ids"]), made_tasks=tuple(row["task_ids"]))


def _appender(buffer: Buffer) -> SegmentAppender:
    """Return where segments are written again. A purge frees space, so it may use the space that writers must leave free."""
    if isinstance(buffer.segments, PosixSegmentStore):
        return PosixSegmentStore(buffer.segments.folder, owner=buffer.segments.owner).appender()
    return buffer.segments.appender()


def _chunks(candidates: list[Row]) -> Iterator[list[int]]:
    """Yield experiences of whole segments, the number that one transaction takes."""
    chunk: list[int] = []
    segments = num_bytes = 0
    for _, rows in groupby(candidates, key=lambda row: row["segment_id"]):
        same = list(rows)
        if chunk and (segments >= _CHUNK_SEGMENTS or num_bytes + same[0]["length_bytes"] > _CHUNK_BYTES):
            yield chunk
            chunk, segments, num_bytes = [], 0, 0
        chunk += [row["experience_id"] for row in same]
        segments, num_bytes = segments + 1, num_bytes + same[0]["length_bytes"]
    if chunk:
        yield chunk


@dataclass(frozen=True)
class _Chunk:
    """What the transactions of one purge share.

    Attributes:
        versions: of the rows of the experiences when they were chosen.
    """

    buffer: Buffer
    choice: Choice
    order: PurgeOrder
    purge_id: int
    versions: dict[int, str]


class _ChangedError(ConflictError):
    """Some experiences must not be purged any more; `left` must."""

    def __init__(self, left: list[int]) -> None:
        super().__init__("experiences that would be purged were changed meanwhile", todo="run it again")
        self.left = left


def _purge_chunk(chunk: _Chunk, appender: SegmentAppender, ids: list[int], tries: int) -> int:
    """Purge some experiences in one transaction, tried again after a conflict, and without those that are to stay after all."""
    while ids:
        try:
            return _try_chunk(chunk, appender, ids)
        except _ChangedError as error:
            ids = error.left
        except ConflictError:
            tries -= 1
            if not tries:
                raise
    return 0


def _try_chunk(chunk: _Chunk, appender: SegmentAppender, ids: list[int]) -> int:
    buffer = chunk.buffer
    rows = buffer.database.fetch("purge_candidates", experience_ids=ids)
    moves = [
        _rewrite(buffer, appender, segment_id, list(same))
        for segment_id, same in groupby(rows, key=lambda r: r["segment_id"])
    ]
    appender.sync()
    try:
        with buffer.database.transaction() as connection:
            purged = _commit_chunk(connection, chunk, moves, ids)
    except BufferUnavailableError:
        raise  # the transaction may have been committed
    except RftError:
        for move in moves:  # no row refers to the copies, so they would be left without a record
            buffer.segments.erase(move.copy.uri, move.copy.offset_bytes, move.copy.length_bytes)
        raise
    buffer.reader.forget()
    return purged


def _commit_chunk(connection: Connection, chunk: _Chunk, moves: list[Move], ids: list[int]) -> int:
    purge_id = chunk.purge_id
    _confirm(connection, chunk, ids)
    moved = commit_moves(connection, moves) if moves else set()
    for move in moves:
        if move.origin.segment_id not in moved:
            raise ConflictError(f"segment {move.origin.segment_id} was moved meanwhile", todo="run it again")
    purged = int(
        fetch(connection, "purge_texts", experience_ids=ids, purge_id=purge_id, tasks_too=chunk.order.tasks_too)[0][
            "purged"
        ]
    )
    # As the groups are locked, no draw or fork can take them.
    for row in fetch(connection, "being_trained_on", experience_ids=ids):
        raise RftError(
            f"experience {row['experience_id']} is in the batch that step {row['trainer_step']} of run {row['run']!r} trains on",
            todo="run it again when the step is done, or stop the run first; it was not purged",
        )
    for row in fetch(connection, "unpurged_sharers", experience_ids=ids):
        raise RftError(
            f"experience {row['experience_id']} was forked meanwhile, and shares arrays with one that would be purged",
            todo="run it again; what was not purged before stays as it is",
        )
    origins = [move.origin for move in moves]
    execute(
        connection,
        "retire_ranges",
        purge_id=purge_id,
        segment_ids=[o.segment_id for o in origins],
        uris=[o.uri for o in origins],
        offsets=[o.offset_bytes for o in origins],
        lengths=[o.length_bytes for o in origins],
        checksums=[o.checksum for o in origins],
    )
    saved = sum(move.origin.length_bytes - move.copy.length_bytes for move in moves)
    execute(connection, "count_purged", purge_id=purge_id, num_experiences=purged, num_bytes=saved)
    return purged


def _confirm(connection: Connection, chunk: _Chunk, ids: list[int]) -> None:
    """Lock experiences with their groups and runs, and decide again whether they are to be purged.

    Raises:
        _ChangedError: some of them are to stay.
    """
    rows = fetch(connection, "lock_purged", experience_ids=ids)
    changed = [row["experience_id"] for row in rows if row["version"] != chunk.versions[row["experience_id"]]]
    left = chunk.choice.confirm(connection, ids, changed)
    if chunk.order.kind == "retention":
        copied = {i for row in fetch(connection, "sharers_of_arrays", experience_ids=left) for i in row["shares_with"]}
        left = [i for i in left if i not in copied]
    if len(left) < len(ids):
        raise _ChangedError(left)


def _rewrite(buffer: Buffer, appender: SegmentAppender, segment_id: int, rows: list[Row]) -> Move:
    """Write a segment again without the values of some rows."""
    first = rows[0]
    address = SegmentAddress(
        segment_id=segment_id,
        uri=first["uri"],
        offset_bytes=first["offset_bytes"],
        length_bytes=first["length_bytes"],
        checksum=first["checksum"],
    )
    batch = buffer.segments.read(address, verify=True)
    return Move(address, appender.append(emptied(batch, [row["segment_row"] for row in rows])))
