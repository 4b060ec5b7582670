"""Compaction of segment files after their writer has exited: merging, cutting, removing. Addresses in `rft.experience` never change.

The state of a file is in `rft.segment_file`: appended to → closed → retired → removed.

- *closed*: no segment is committed to it any more. Only files without a writer are closed: no process on this host holds their
  lock, and they were not written for the grace period. If a writer on another host was wrongly assumed to be gone, its next
  commit to the file fails, and it continues in a new file.
- Segments of closed files that are small or mostly dead are copied byte for byte into larger files. The copy is durable before one
  transaction moves their addresses.
- *retired*: no segment is in it. It stays for the grace period, which is longer than a reader uses an address
  (`ADDRESS_MAX_AGE_S`); later a reader asks the database again.
- *removed*: unlinked. The name stays in the table, so that no writer can commit to it.

In a buffer from which data was purged, bytes are overwritten before they are cut off or removed (`rftdata.maintenance.erasure`), and
retired files stay for at least an hour.

Orphans are files that no committed row names (their writer or compaction was killed before its first commit). They get a row, closed
and retired, before they are removed. Bytes beyond the committed length of a closed file are cut off.

Every step is durable before the next begins, and the next run repeats an unfinished step: a kill at any point loses nothing.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import psycopg

from rftdata.errors import RftError, SegmentCorruptError, SegmentFileClosedError
from rftdata.postgres.database import Connection, Database, Row, fetch
from rftdata.postgres.locks import Lock, holding
from rftdata.segments.base import ROLL_BYTES, Appended, SegmentAddress, SegmentStore, StoredFile

DEFAULT_GRACE_S = 3600.0
# In the background files are merged only when there are this many, since each merge writes the last result again.
_BACKGROUND_MIN_FILES = 8
_BACKGROUND_EVERY_S = 60.0
_SMALL_BYTES = ROLL_BYTES // 8


@dataclass
class CompactionReport:
    """The result of a compaction, and what it left for later."""

    files_merged: int = 0
    segments_moved: int = 0
    bytes_moved: int = 0
    files_cut: int = 0
    orphans_removed: int = 0
    files_removed: int = 0
    bytes_freed: int = 0
    files_waiting: int = 0
    damaged: list[str] = field(default_factory=list)

    @property
    def did_something(self) -> bool:
        return any(getattr(self, one.name) for one in fields(self) if one.name not in ("files_waiting", "damaged"))


@dataclass(frozen=True)
class Move:
    """A segment whose bytes were durably copied from one address to another."""

    origin: SegmentAddress
    copy: Appended


def commit_moves(connection: Connection, moves: Sequence[Move]) -> set[int]:
    """Set new addresses of segments, in the caller's transaction.

    Args:
        moves: copies that are already durable. Their bytes may differ from the old ones, and so may the checksum.

    Returns:
        The ids of moved segments. Others no longer live at their old address, because another compaction moved them; the copy is discarded.

    Raises:
        SegmentFileClosedError: a file with copies was closed before.
    """
    ends = [(move.copy.uri, move.copy.offset_bytes + move.copy.length_bytes) for move in moves]
    registered = fetch(connection, "register_files", uris=[uri for uri, _ in ends], sizes=[end for _, end in ends])
    if len(registered) < len({uri for uri, _ in ends}):
        raise SegmentFileClosedError(
            "a file to which segments were copied was closed meanwhile", todo="copy them again"
        )
    rows = fetch(
        connection,
        "move_segments",
        segment_ids=[m.origin.segment_id for m in moves],
        from_uris=[m.origin.uri for m in moves],
        from_offsets=[m.origin.offset_bytes for m in moves],
        to_uris=[m.copy.uri for m in moves],
        to_offsets=[m.copy.offset_bytes for m in moves],
        to_lengths=[m.copy.length_bytes for m in moves],
        to_checksums=[m.copy.checksum for m in moves],
    )
    return {row["segment_id"] for row in rows}


def close_files(database: Database, uris: Sequence[str]) -> dict[str, int]:
    """Stop commits to these files, so that a live writer continues in a new one; return their committed sizes in bytes."""
    with database.transaction() as connection:
        return {row["uri"]: row["size_bytes"] for row in fetch(connection, "close_files", uris=list(uris))}


@contextlib.contextmanager
def lock_moves(database: Database, *, wait_s: float = 0.0) -> Iterator[bool]:
    """Hold the lock for moving segments; yield False if another process still holds it after `wait_s`."""
    with holding(database, Lock("compaction"), wait_s=wait_s) as held_by:
        yield held_by is None


class Compactor:
    """Compacts the segment files of one buffer.

    Args:
        database, store: the buffer's.
        grace_s: time without writes after which a file's writer is assumed to be gone, and time for which a retired file stays.
        min_files: small files are merged when there are at least this many.
        alone: no other process has the buffer open, so there are no readers and writers to wait for.
        on_step: called with the name of each step before it.
    """

    def __init__(
        self,
        database: Database,
        store: SegmentStore,
        *,
        grace_s: float = DEFAULT_GRACE_S,
        min_files: int = 2,
        alone: bool = False,
        on_step: Callable[[str], None] = lambda step: None,
    ) -> None:
        self._database = database
        self._store = store
        self._grace_s = grace_s
        self._alone = alone
        self._min_files = min_files
        self._on_step = on_step
        self._unreadable: set[int] = set()

    def run(self, stop: Callable[[], bool] = lambda: False) -> CompactionReport | None:
        """Merge, cut, collect orphans, and remove files that were retired long enough ago.

        Args:
            stop: called between files; if true, the rest is left to the next run.

        Returns:
            The report; None while another compaction runs.

        Raises:
            DiskFullError, BufferUnavailableError: it could not continue; nothing is lost.
        """
        report = CompactionReport()
        with lock_moves(self._database) as is_held:
            if not is_held:
                return None
            recorded, stored = self._inventory()
            chosen = self._to_merge(recorded, stored)
            self._merge(chosen, report, stop)
            self._clear(recorded, stored, set(chosen), report, stop)
        return report

    def clear(self) -> CompactionReport | None:
        """Cut, collect orphans and remove like `run`, but merge nothing; None as for `run`."""
        report = CompactionReport()
        with lock_moves(self._database) as is_held:
            if not is_held:
                return None
            recorded, stored = self._inventory()
            self._clear(recorded, stored, set(), report, lambda: False)
        return report

    def _inventory(self) -> tuple[dict[str, Row], dict[str, StoredFile]]:
        """Return the files that the database knows, and the files in the folder."""
        # The folder first, so that a file committed in between is known to the database.
        stored = {file.uri: file for file in self._store.files()}
        recorded = {row["uri"]: row for row in self._database.fetch("segment_files")}
        return recorded, stored

    def _clear(
        self,
        recorded: dict[str, Row],
        stored: dict[str, StoredFile],
        merged: set[str],
        report: CompactionReport,
        stop: Callable[[], bool],
    ) -> None:
        self._cut(recorded, stored, merged, report, stop)
        self._remove_orphans(stored, report)
        self._remove_retired(stored, report)

    def rewrite(self, uris: Sequence[str]) -> CompactionReport | None:
        """Copy the live segments of these files elsewhere, whether their writers live or not, and retire the files; None as for `run`."""
        report = CompactionReport()
        with lock_moves(self._database) as is_held:
            if not is_held:
                return None
            self._merge(uris, report, lambda: False)
        return report

    def _is_idle(self, row: Row, stored: dict[str, StoredFile]) -> bool:
        """Return whether a file of this buffer exists and is in use, but no writer appends to it."""
        file = stored.get(row["uri"])
        if file is None or not file.is_ours or row["retired_s"] is not None:
            return False
        # Closing a file makes a commit to it fail, so a writer that lost its session and comes back continues in a new one.
        return row["closed"] or self._alone or (file.age_s >= self._grace_s and not self._store.is_written(row["uri"]))

    def _to_merge(self, recorded: dict[str, Row], stored: dict[str, StoredFile]) -> list[str]:
        idle = [row for row in recorded.values() if self._is_idle(row, stored)]
        wasteful = [row for row in idle if 2 * row["live_bytes"] < stored[row["uri"]].size_bytes]
        small = [row for row in idle if row["live_bytes"] < _SMALL_BYTES and row not in wasteful]
        if len(small) + len(wasteful) < self._min_files:
            small = []
        return [row["uri"] for row in wasteful + small]

    def _merge(self, uris: Sequence[str], report: CompactionReport, stop: Callable[[], bool]) -> None:
        """Empty files one after the other; each is moved and retired in its own transaction."""
        if not uris:
            return
        self._on_step("close")
        close_files(self._database, uris)
        with contextlib.closing(self._store.appender()) as appender:
            for uri in uris:
                if stop():
                    return
                self._on_step("copy")
                rows = self._database.fetch("segments_of_file", uri=uri)
                moves = []
                for row in rows:
                    num_rows = row.pop("num_rows")
                    address = SegmentAddress(**row)
                    if address.segment_id in self._unreadable:
                        continue
                    try:
                        moves.append(Move(address, appender.append_bytes(self._store.read_bytes(address), num_rows)))
                    except SegmentCorruptError as error:
                        # The segment stays in its file, and the file stays, so that it can be restored there.
                        self._unreadable.add(address.segment_id)
                        report.damaged.append(str(error))
                self._on_step("sync")
                appender.sync()
                self._on_step("move")
                with self._database.transaction() as connection:
                    moved = commit_moves(connection, moves) if moves else set()
                    retired = fetch(connection, "retire_empty_files", uris=[uri])
                self._on_step("moved")
                report.files_merged += len(retired)
                report.segments_moved += len(moved)
                report.bytes_moved += sum(move.copy.length_bytes for move in moves)

    def _cut(
        self,
        recorded: dict[str, Row],
        stored: dict[str, StoredFile],
        merged: set[str],
        report: CompactionReport,
        stop: Callable[[], bool],
    ) -> None:
        """Cut uncommitted bytes from the end of files without a writer."""
        for row in recorded.values():
            uri = row["uri"]
            if uri in merged or stop() or not self._is_idle(row, stored) or stored[uri].size_bytes <= row["size_bytes"]:
                continue
            size = close_files(self._database, [uri])[uri]
            if stored[uri].size_bytes > size:
                self._on_step("cut")
                if self._was_purged():
                    self._store.erase(uri, size, stored[uri].size_bytes - size)
                self._store.cut(uri, size)
                report.files_cut += 1
                report.bytes_freed += stored[uri].size_bytes - size

    def _remove_orphans(self, stored: dict[str, StoredFile], report: CompactionReport) -> None:
        old = [
            f.uri
            for f in stored.values()
            if f.is_ours and f.age_s >= self._grace_s and (self._alone or not self._store.is_written(f.uri))
        ]
        unknown = self._database.fetch("unknown_files", uris=old) if old else []
        if not unknown:
            return
        self._on_step("retire")
        # Excludes a file that a late commit has named meanwhile.
        buried = self._database.fetch("bury_orphans", uris=[row["uri"] for row in unknown if not row["was_removed"]])
        orphans = [row["uri"] for row in buried] + [row["uri"] for row in unknown if row["was_removed"]]
        self._remove(orphans, stored, report)
        report.orphans_removed += len(orphans)

    def _remove_retired(self, stored: dict[str, StoredFile], report: CompactionReport) -> None:
        recorded = self._database.fetch("segment_files")
        # Whatever a row says, a file with live segments or of another buffer stays.
        retired = [row for row in recorded if row["retired_s"] is not None and not row["num_segments"]]
        retired = [row for row in retired if self._store.is_ours(row["uri"])]
        # A reader keeps what it has mapped of a removed file, but not of an overwritten one.
        overwritten = self._was_purged() and not self._alone
        grace_s = max(self._grace_s, DEFAULT_GRACE_S) if overwritten else self._grace_s
        due = [row["uri"] for row in retired if row["retired_s"] >= grace_s]
        self._remove(due, stored, report)
        report.files_removed += sum(uri in stored for uri in due)
        report.files_waiting = len(retired) - len(due)

    def _was_purged(self) -> bool:
        """Return whether removed bytes may be copies of purged data, so that they must be overwritten first."""
        return bool(self._database.fetch("any_purge")[0]["found"])

    def _remove(self, uris: Sequence[str], stored: dict[str, StoredFile], report: CompactionReport) -> None:
        if not uris:
            return
        self._on_step("remove")
        if self._was_purged():
            for uri in [uri for uri in uris if uri in stored]:
                self._store.erase(uri, 0, stored[uri].size_bytes)
        report.bytes_freed += self._store.remove(uris)
        self._on_step("forget")
        self._database.run("forget_files", uris=list(uris))


class BackgroundCompaction:
    """Compacts every minute in a separate thread while the block runs; several processes take turns.

    Args:
        database, store, grace_s: as for `Compactor`.

    Attributes:
        progress: the work done so far and the last failure, as a worker shows it.
    """

    def __init__(
        self, database: Database, store: SegmentStore, *, grace_s: float, every_s: float = _BACKGROUND_EVERY_S
    ) -> None:
        self._compactor = Compactor(database, store, grace_s=grace_s, min_files=_BACKGROUND_MIN_FILES)
        self._every_s = every_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, name="compaction", daemon=True)
        self.progress: dict[str, Any] = {}

    def __enter__(self) -> BackgroundCompaction:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._stopped.wait(self._every_s):
            try:
                report = self._compactor.run(self._stopped.is_set)
            except (RftError, psycopg.Error, OSError) as error:
                # Housekeeping must not end the main work: record the failure and try again.
                what = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                self.progress = self.progress | {"last_compaction_error": f"at {time.strftime('%H:%M:%S')}, {what}"}
                continue
            if report is not None and report.did_something:
                counted = {name: getattr(report, name) for name in ("files_merged", "files_removed", "bytes_freed")}
                self.progress = self.progress | {name: self.progress.get(name, 0) + n for name, n in counted.items()}
