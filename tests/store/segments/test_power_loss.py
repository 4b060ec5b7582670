"""Power loss at any moment: what the database has committed is on the disk, whatever had not been synced.

The file operations of the real writer and the real compaction are recorded at the level of the operating system, together with
the commits of the database. Then, for every prefix of that record, every state of the folder that a power cut may leave is built
anew and opened:

- bytes written before the last completed flush of their file began are there; bytes after it are there, absent, cut short, or
  zeros where the length reached the disk before the content did;
- a name made, or removed, since the last completed flush of its folder may be there or not; one before it stands.

PostgreSQL's own durability is taken as given: a transaction is committed from the moment its COMMIT returns, and may be from the
moment it is sent.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rftdata import Buffer
from rftdata.errors import RftError
from rftdata.maintenance.verification import verify
from rftdata.postgres.database import Connection, Database
from rftdata.segments.base import SegmentAddress
from rftdata.segments.compaction import Compactor
from rftdata.segments.posix import PosixSegmentStore
from tests.support.store_roles import own_group

Addresses = frozenset[SegmentAddress]


@dataclass(frozen=True)
class Event:
    """One thing that happened.

    kind: make, write, cut, remove (`name`), flush-begins, flush-ended (`name`; empty: the folder), commit-sent, commit-returned.
    """

    kind: str
    name: str = ""
    data: bytes = b""
    size: int = 0
    flush: int = 0
    addresses: Addresses = frozenset()


class Recorder:
    """Wraps the calls of `os` that change files below a folder, and the transactions of a database.

    Args:
        skip: flushes not to make, as a mutation of the code would: `files`, `folder` or nothing.
    """

    def __init__(self, folder: Path, database: Database, skip: str = "") -> None:
        self.folder, self.skip = folder, skip
        self.events: list[Event] = []
        self._database = database
        self._lock = threading.Lock()
        self._names: dict[int, str] = {}
        self._flushes = itertools.count(1)

    def note(self, kind: str, **values: Any) -> None:
        with self._lock:
            self.events.append(Event(kind, **values))

    @contextlib.contextmanager
    def recording(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        with monkeypatch.context() as patch:
            for name in ("open", "close", "write", "fsync", "fdatasync", "ftruncate", "unlink"):
                patch.setattr(os, name, self._wrapped(name, getattr(os, name)))
            for name in ("rename", "replace", "truncate", "pwrite", "writev", "remove", "link", "symlink"):
                patch.setattr(os, name, self._unexpected(name, getattr(os, name)))
            patch.setattr(Database, "transaction", self._transaction())
            yield

    def _name(self, path: Any, dir_fd: int | None = None) -> str | None:
        if not isinstance(path, str | os.PathLike):
            return None
        if dir_fd is not None:
            return str(path) if self._names.get(dir_fd) == "" else None
        path = Path(path)
        return path.name if path.parent == self.folder else "" if path == self.folder else None

    def _unexpected(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *rest: Any, **options: Any) -> Any:
            assert self._name(path) is None, (
                f"os.{name} on a segment file: teach this test what a power cut makes of it"
            )
            return real(path, *rest, **options)

        return call

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        return {
            "open": self._open,
            "close": self._close,
            "write": self._write,
            "ftruncate": self._truncate,
            "unlink": self._unlink,
        }.get(name, self._flush)(real)

    def _open(self, real: Callable[..., int]) -> Callable[..., int]:
        def call(path: Any, flags: int, *rest: Any, **options: Any) -> int:
            name = self._name(path, options.get("dir_fd"))
            if name and flags & os.O_CREAT:
                assert flags & os.O_EXCL, "a file that may exist is opened for writing"
                self.note("make", name=name)
            descriptor = real(path, flags, *rest, **options)
            if name is not None:
                self._names[descriptor] = name
            return descriptor

        return call

    def _close(self, real: Callable[[int], None]) -> Callable[[int], None]:
        def call(descriptor: int) -> None:
            self._names.pop(descriptor, None)
            real(descriptor)

        return call

    def _write(self, real: Callable[..., int]) -> Callable[..., int]:
        def call(descriptor: int, data: Any) -> int:
            name = self._names.get(descriptor)
            if name:
                self.note("write", name=name, data=bytes(data))
            written = real(descriptor, data)
            assert not name or written == len(data)
            return written

        return call

    def _flush(self, real: Callable[[int], None]) -> Callable[[int], None]:
        def call(descriptor: int) -> None:
            name = self._names.get(descriptor)
            if name is None:
                return real(descriptor)
            if self.skip == ("files" if name else "folder"):
                return None
            number = next(self._flushes)
            self.note("flush-begins", name=name, flush=number)
            real(descriptor)
            self.note("flush-ended", name=name, flush=number)
            return None

        return call

    def _truncate(self, real: Callable[..., None]) -> Callable[..., None]:
        def call(descriptor: int, size: int) -> None:
            name = self._names.get(descriptor)
            if name:
                self.note("cut", name=name, size=size)
            real(descriptor, size)

        return call

    def _unlink(self, real: Callable[..., None]) -> Callable[..., None]:
        def call(path: Any, **options: Any) -> None:
            name = self._name(path, options.get("dir_fd"))
            if name:
                self.note("remove", name=name)
            real(path, **options)

        return call

    def _transaction(self) -> Callable[[Database], contextlib.AbstractContextManager[Connection]]:
        real = Database.transaction

        @contextlib.contextmanager
        def transaction(database: Database) -> Iterator[Connection]:
            addresses: Addresses = frozenset()
            with real(database) as connection:
                yield connection
                addresses = committed(connection)
                self.note("commit-sent", addresses=addresses)
            self.note("commit-returned", addresses=addresses)

        return transaction


def committed(connection: Connection) -> Addresses:
    rows = connection.execute(
        "SELECT segment_id, uri, offset_bytes, length_bytes, checksum FROM rft.segment JOIN rft.segment_file USING (file_id)"
    ).fetchall()
    return frozenset(SegmentAddress(**row) for row in rows)


@dataclass
class File:
    """A file as the operating system shows it, and as far as the disk has promised to keep it."""

    content: bytes = b""
    kept: bytes = b""
    flushing: dict[int, bytes] = field(default_factory=dict)

    def states(self) -> set[bytes]:
        """What a power cut may leave of its content."""
        if self.content == self.kept:
            return {self.kept}
        if not self.content.startswith(self.kept):  # cut back, not flushed yet
            return {self.kept, self.content}
        new = self.content[len(self.kept) :]
        half = new[: len(new) // 2]
        return {
            self.kept,
            self.content,
            self.kept + half,
            self.kept + bytes(len(new)),
            self.kept + half + bytes(len(new) - len(half)),
        }


@dataclass
class Disk:
    """A folder through time."""

    files: dict[str, File] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    kept_names: set[str] = field(default_factory=set)
    flushing: dict[int, set[str]] = field(default_factory=dict)

    def happens(self, event: Event) -> None:
        file = self.files.setdefault(event.name, File()) if event.name else File()
        if event.kind == "make":
            self.names.add(event.name)
        elif event.kind == "write":
            file.content += event.data
        elif event.kind == "cut":
            file.content = file.content[: event.size]
        elif event.kind == "remove":
            self.names.discard(event.name)
        elif event.kind == "flush-begins" and event.name:
            file.flushing[event.flush] = file.content
        elif event.kind == "flush-ended" and event.name:
            file.kept = file.flushing.pop(event.flush)
        elif event.kind == "flush-begins":
            self.flushing[event.flush] = set(self.names)
        elif event.kind == "flush-ended":
            self.kept_names = self.flushing.pop(event.flush)

    def states(self) -> Iterator[dict[str, bytes]]:
        """Every folder that a power cut may leave now."""
        choices = []
        for name in sorted(self.names | self.kept_names):
            found: list[bytes | None] = sorted(self.files[name].states())  # type: ignore[assignment]
            if not (name in self.names and name in self.kept_names):
                found.append(None)
            choices.append([(name, one) for one in found])
        for combination in itertools.product(*choices):
            yield {name: content for name, content in combination if content is not None}


def losses(events: list[Event], expected: dict[int, bytes], tmp_path: Path) -> tuple[list[str], int]:
    """What committed segments some power cut would lose, and how many states were opened.

    Args:
        events: since the folder was empty.
        expected: the token ids of every segment, as bytes.
    """
    disk, sure, maybe = Disk(), frozenset[SegmentAddress](), frozenset[SegmentAddress]()
    found: list[str] = []
    seen: dict[tuple[Any, ...], None] = {}
    for number, event in enumerate(events):
        disk.happens(event)
        if event.kind == "commit-sent":
            maybe = event.addresses
        elif event.kind == "commit-returned":
            sure = maybe = event.addresses
        for state in disk.states():
            for addresses in {sure, maybe}:
                key = (frozenset(state.items()), addresses)
                if key in seen:
                    continue
                seen[key] = None
                why = opened_without(state, addresses, expected, tmp_path / f"cut-{len(seen)}")
                found += [f"after {event.kind} (event {number}): {one}" for one in why]
    return found, len(seen)


def opened_without(
    state: dict[str, bytes], addresses: Addresses, expected: dict[int, bytes], folder: Path
) -> list[str]:
    """Restore a folder, open it, and read what the database lists in it."""
    folder.mkdir()
    for name, content in state.items():
        (folder / name).write_bytes(content)
    store, why = PosixSegmentStore(folder), []
    for address in addresses:
        try:
            batch = store.read(address, verify=True)
        except RftError as error:
            why.append(str(error))
        else:
            assert batch.column("token_ids").values.to_numpy().tobytes() == expected[address.segment_id]
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    return why


def play(buffer: Buffer, monkeypatch: pytest.MonkeyPatch, skip: str = "", late: str = "") -> Recorder:
    """Two writers with three writes each, one of which is killed; a compaction without grace; a third writer; another compaction.

    Args:
        skip: flushes that are not made.
        late: `write` or `compact` when only the part of that name skips them.
    """
    run = buffer.create_run(name="power", config={}, seed=1, steps=1, pipeline_version="p1")
    assert isinstance(buffer.segments, PosixSegmentStore)
    recorder = Recorder(buffer.segments.folder, buffer.database)

    def write(name: str) -> None:
        recorder.skip = skip if late in ("", "write") else ""
        with recorder.recording(monkeypatch), buffer.writer(run) as writer:
            for part in range(3):
                writer.insert(own_group(task_key=f"{name}{part}", rewards=[0.0] * (part + 1)))

    def compact() -> None:
        recorder.skip = skip if late in ("", "compact") else ""
        with recorder.recording(monkeypatch):
            report = Compactor(buffer.database, buffer.segments, grace_s=0).run()
        assert report is not None and report.files_merged and report.files_removed

    write("a")
    write("b")
    die_after_an_append(buffer, recorder, monkeypatch)
    compact()
    write("c")
    compact()
    return recorder


def die_after_an_append(buffer: Buffer, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that never commits what it appended: a file that becomes an orphan."""
    address, _ = next(buffer.reader.all_addresses())
    with recorder.recording(monkeypatch), contextlib.closing(buffer.segments.appender()) as appender:
        appender.append_bytes(buffer.segments.read_bytes(address), 1)


def contents(buffer: Buffer) -> dict[int, bytes]:
    return {
        address.segment_id: buffer.reader.read(address).column("token_ids").values.to_numpy().tobytes()
        for address, _ in buffer.reader.all_addresses()
    }


def test_no_power_cut_loses_what_was_committed(buffer: Buffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = play(buffer, monkeypatch)
    kinds = {event.kind for event in recorder.events}
    assert kinds == {"make", "write", "flush-begins", "flush-ended", "remove", "commit-sent", "commit-returned"}
    found, states = losses(recorder.events, contents(buffer), tmp_path)
    assert found == []
    assert states > 200


def test_no_power_cut_loses_what_was_committed_before_a_file_was_cut(
    buffer: Buffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = buffer.create_run(name="power", config={}, seed=1, steps=1, pipeline_version="p1")
    assert isinstance(buffer.segments, PosixSegmentStore)
    recorder = Recorder(buffer.segments.folder, buffer.database)
    with recorder.recording(monkeypatch):
        with buffer.writer(run) as writer:
            writer.insert(own_group())
            writer._store.appender.append_bytes(buffer.segments.read_bytes(next(buffer.reader.all_addresses())[0]), 1)
        report = Compactor(buffer.database, buffer.segments, grace_s=0).run()
    assert report is not None and report.files_cut == 1
    assert losses(recorder.events, contents(buffer), tmp_path)[0] == []


def test_a_new_folder_is_kept_with_every_folder_above_it_that_was_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []
    opened: dict[int, Path] = {}
    real_mkdir, real_open, real_fsync = os.mkdir, os.open, os.fsync

    def mkdir(path: Any, *rest: Any, **options: Any) -> None:
        real_mkdir(path, *rest, **options)
        made.append(Path(path))

    def open_(path: Any, *rest: Any, **options: Any) -> int:
        descriptor = real_open(path, *rest, **options)
        opened[descriptor] = Path(path)
        return descriptor

    def fsync(descriptor: int) -> None:
        real_fsync(descriptor)
        made[:] = [one for one in made if one.parent != opened[descriptor]]

    for name, wrapped in (("mkdir", mkdir), ("open", open_), ("fsync", fsync)):
        monkeypatch.setattr(os, name, wrapped)
    PosixSegmentStore(tmp_path / "a" / "b" / "segments")
    assert made == [] and (tmp_path / "a" / "b" / "segments").is_dir()


@pytest.mark.parametrize("part", ["write", "compact"])
@pytest.mark.parametrize("skip", ["files", "folder"])
def test_a_flush_that_is_left_out_is_found(
    buffer: Buffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skip: str, part: str
) -> None:
    """The test of the test: without the flushes of files, or of the folder, some power cut loses a committed segment."""
    recorder = play(buffer, monkeypatch, skip, part)
    found, _ = losses(recorder.events, contents(buffer), tmp_path)
    assert found != []


def test_a_folder_that_a_power_cut_left_opens_as_a_buffer(
    buffer: Buffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every last state, with the whole database beside it: the check is clean, and a compaction tidies up what was not kept."""
    recorder = play(buffer, monkeypatch)
    disk = Disk()
    for event in recorder.events:
        disk.happens(event)
    stored = contents(buffer)
    for number, state in enumerate(disk.states()):
        folder = tmp_path / f"after-{number}"
        folder.mkdir()
        for name, content in state.items():
            (folder / name).write_bytes(content)
        store = PosixSegmentStore(folder)
        again = Buffer(buffer.config, buffer.database, None, store)
        assert list(verify(again)) == []
        Compactor(buffer.database, store, grace_s=0).run()
        assert contents(again) == stored and list(verify(again)) == []
