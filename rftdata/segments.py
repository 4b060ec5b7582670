"""The data plane: token arrays in append-only Arrow segments.

A segment is one record batch, stored as a complete Arrow IPC *stream* (schema, batch, end) in some file at some offset,
addressed for ever by its id in `rft.segment`. A writer appends to a file of its own, makes the bytes durable, and only
then commits offset, length and checksum to SQL; bytes beyond a committed length mean nothing. Readers map files into
memory and read batches without copying. What the batches hold: `rftdata.arrays`.

An appender holds an advisory lock (flock) on its file, which the kernel releases however the process ends: others on the host
see by it whether the writer lives. It only spares a live writer's file; what keeps a writer from appending to a file that
`rftdata.compaction` is about to remove is `rft.segment_file.closed_at`, checked by the transaction that commits a segment.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import socket
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import xxhash

from rftdata.durable import give_back, make_folder, sync_path
from rftdata.errors import BufferUnavailableError, DiskFullError, RftError, SegmentCorruptError

# An appender goes on in a new file when its file is larger than this.
ROLL_BYTES = 512 * 2**20
# How long a reader may use an address, or a mapped file, before it asks the database again. Files that were moved elsewhere stay
# for a grace longer than this: on a shared filesystem a mapped file that another host removes is gone at once.
ADDRESS_MAX_AGE_S = 600.0
_SUFFIX = ".arrows"


@dataclass(frozen=True)
class SegmentAddress:
    """Where a segment's bytes are now."""

    segment_id: int
    uri: str
    offset_bytes: int
    length_bytes: int
    checksum: str


@dataclass(frozen=True)
class Appended:
    """What an append made durable: the file, the range and its checksum."""

    uri: str
    offset_bytes: int
    length_bytes: int
    num_rows: int
    checksum: str


@dataclass(frozen=True)
class StoredFile:
    """A file of a store: where it is, its size, how long ago it was written to, and whether its name says that it is this buffer's."""

    uri: str
    size_bytes: int
    age_s: float
    is_ours: bool


class SegmentAppender(ABC):
    """Appends segments to a place of its own; used by one thread at a time."""

    @abstractmethod
    def append(self, batch: pa.RecordBatch) -> Appended:
        """Write a batch and begin to make it durable; it is so when `sync` has returned.

        Raises:
            DiskFullError: not enough room; nothing of the batch will be seen.
        """

    @abstractmethod
    def append_bytes(self, data: pa.Buffer, num_rows: int) -> Appended:
        """Write a segment's bytes as they are (a copy from elsewhere); durable when `sync` has returned.

        Raises:
            DiskFullError: not enough room; nothing of them will be seen.
        """

    @abstractmethod
    def roll(self) -> None:
        """Leave the file: what comes next goes to a new one. What was appended and not synced is lost."""

    @abstractmethod
    def sync(self) -> None:
        """Wait until everything appended is durable.

        Raises:
            DiskFullError, BufferUnavailableError: it is not, and nothing of it may be committed.
        """

    @abstractmethod
    def close(self) -> None: ...


class SegmentStore(ABC):
    """A place for segments."""

    @abstractmethod
    def appender(self) -> SegmentAppender: ...

    @abstractmethod
    def read(self, address: SegmentAddress, *, verify: bool = False) -> pa.RecordBatch:
        """The batch at an address.

        Raises:
            SegmentCorruptError: missing file, truncated range, checksum mismatch (with `verify`), undecodable bytes.
            BufferUnavailableError: not this segment but the store cannot be read.
        """

    @abstractmethod
    def read_bytes(self, address: SegmentAddress) -> pa.Buffer:
        """The bytes at an address, compared with their checksum; raises as `read` does."""

    @abstractmethod
    def files(self) -> Iterator[StoredFile]:
        """Every file of the store."""

    @abstractmethod
    def is_written(self, uri: str) -> bool:
        """Whether an appender that lives on this host holds the file; False for one on another host, and for a missing file."""

    @abstractmethod
    def cut(self, uri: str, size_bytes: int) -> None:
        """Take away what lies beyond the first `size_bytes` of a file, durably."""

    @abstractmethod
    def remove(self, uris: Iterable[str]) -> int:
        """Remove files durably; those missing already are no error. The number of bytes given back."""

    def erase(self, uri: str, offset_bytes: int, length_bytes: int) -> None:
        """Overwrite bytes that no segment refers to and no reader can hold; a file that is gone holds none.

        Raises:
            BufferUnavailableError: this kind of store cannot, or the file cannot be written.
        """
        raise BufferUnavailableError(
            f"{type(self).__name__} cannot overwrite parts of a file",
            todo=f"remove the object {uri} once no segment is in it",
        )


class PosixSegmentStore(SegmentStore):
    """Segments in files below a folder.

    Args:
        folder: made when missing.
        min_free_bytes: appends that would leave less free disk are refused.
        owner: what names of its files begin with, so that the files of buffers that share a folder are told apart; empty: the
            folder is this buffer's alone.
    """

    def __init__(self, folder: Path, min_free_bytes: int = 0, owner: str = "") -> None:
        self.folder = folder
        self.owner = owner
        self.min_free_bytes = min_free_bytes
        try:
            make_folder(folder)
        except OSError as error:
            raise BufferUnavailableError(
                f"the folder of the segments cannot be made: {error.strerror}",
                value=str(folder),
                todo="correct buffer.segments",
            ) from error
        self._maps: OrderedDict[str, pa.MemoryMappedFile] = OrderedDict()
        self._maps_since = time.monotonic()
        self._lock = threading.Lock()

    def appender(self) -> SegmentAppender:
        return _PosixAppender(self.folder, self.min_free_bytes, self.owner)

    def read(self, address: SegmentAddress, *, verify: bool = False) -> pa.RecordBatch:
        data = self.read_bytes(address) if verify else self._bytes(address)
        try:
            with pa.ipc.open_stream(data) as reader:
                return reader.read_next_batch()
        except (pa.ArrowException, OSError, StopIteration) as error:
            raise _corrupt(address, f"its bytes are not an Arrow stream: {error}") from error

    def read_bytes(self, address: SegmentAddress) -> pa.Buffer:
        data = self._bytes(address)
        if checksum(memoryview(data)) != address.checksum:
            raise _corrupt(address, "its bytes do not match their checksum")
        return data

    def files(self) -> Iterator[StoredFile]:
        now = time.time()
        with os.scandir(self.folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    if entry.name.endswith(_SUFFIX) and entry.is_file():
                        status = entry.stat()
                        ours = entry.name.startswith(self.owner)
                        yield StoredFile(entry.name, status.st_size, now - status.st_mtime, ours)

    def is_written(self, uri: str) -> bool:
        try:
            descriptor = os.open(self.folder / uri, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # a filesystem without locks: the grace of compaction is all there is
            return False
        finally:
            os.close(descriptor)
        return False

    def cut(self, uri: str, size_bytes: int) -> None:
        try:
            os.truncate(self.folder / uri, size_bytes)
            sync_path(self.folder / uri)
        except OSError as error:
            raise _full(self.folder, error) from error

    def remove(self, uris: Iterable[str]) -> int:
        freed = 0
        try:
            for uri in uris:
                with contextlib.suppress(FileNotFoundError):
                    size = (self.folder / uri).stat().st_size
                    os.unlink(self.folder / uri)
                    freed += size
                with self._lock:
                    self._maps.pop(uri, None)
            sync_path(self.folder)
        except OSError as error:
            raise _full(self.folder, error) from error
        return freed

    def erase(self, uri: str, offset_bytes: int, length_bytes: int) -> None:
        try:
            with open(self.folder / uri, "r+b") as file:
                file.seek(offset_bytes)
                left = length_bytes
                while left > 0:
                    left -= file.write(bytes(min(left, 2**20)))
                file.flush()
                os.fdatasync(file.fileno())
                give_back(file.fileno(), offset_bytes, length_bytes)
        except FileNotFoundError:
            return
        except OSError as error:
            raise _full(self.folder, error) from error

    def _bytes(self, address: SegmentAddress) -> pa.Buffer:
        end = address.offset_bytes + address.length_bytes
        with self._lock:
            if time.monotonic() - self._maps_since > ADDRESS_MAX_AGE_S:
                # Else the space of files that were removed would be held as long as this process lives.
                self._maps.clear()
                self._maps_since = time.monotonic()
            mapped = self._maps.get(address.uri)
            try:
                # Asked every time: touching mapped bytes of a file that was cut ends the process.
                size = (self.folder / address.uri).stat().st_size
                if size < end:
                    raise _corrupt(address, f"its file is only {size} bytes long")
                # A file that grew after it was mapped is mapped again.
                if mapped is None or mapped.size() < end:
                    mapped = self._maps[address.uri] = pa.memory_map(str(self.folder / address.uri))
            except OSError as error:
                raise self._unreadable(address, error) from error
            self._maps.move_to_end(address.uri)
            if len(self._maps) > 256:
                self._maps.popitem(last=False)
            mapped.seek(address.offset_bytes)
            return mapped.read_buffer(address.length_bytes)

    def _unreadable(self, address: SegmentAddress, error: OSError) -> RftError:
        """Damage of one segment, or a folder that is not there: what is true of all segments must not condemn each."""
        if error.errno == errno.EIO:
            return _corrupt(address, f"its file cannot be read: {error.strerror}")
        if error.errno == errno.ENOENT and self.folder.is_dir() and any(True for _ in self.files()):
            return _corrupt(address, "its file is missing")
        why = "it is missing or empty" if error.errno == errno.ENOENT else str(error.strerror)
        return BufferUnavailableError(
            f"the folder of the segments cannot be read: {why}",
            value=str(self.folder),
            todo="mount it, mend its permissions, or correct buffer.segments",
        )


class _PosixAppender(SegmentAppender):
    """One writer's file. After an fsync error the file's state is unknown, so the appender gives up on it for good.

    The disk works while the caller goes on: flushing runs in a thread of its own between `append` and `sync`.
    """

    def __init__(self, folder: Path, min_free_bytes: int, owner: str) -> None:
        self.folder = folder
        self._name = (
            f"{owner}-{socket.gethostname()}-{os.getpid()}" if owner else f"{socket.gethostname()}-{os.getpid()}"
        )
        self.min_free_bytes = min_free_bytes
        self._file: int | None = None
        self._uri = ""
        self._offset = 0
        self._flusher = ThreadPoolExecutor(1, thread_name_prefix="segment-flush")
        self._flushing: Future[None] | None = None
        self._unflushed = False

    def append(self, batch: pa.RecordBatch) -> Appended:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        appended = self.append_bytes(sink.getvalue(), batch.num_rows)
        assert self._file is not None
        self._flushing, self._unflushed = self._flusher.submit(os.fdatasync, self._file), False
        return appended

    def append_bytes(self, data: pa.Buffer, num_rows: int) -> Appended:
        self._check_room(data.size)
        if self._flushing is not None and self._flushing.exception() is not None:
            self._give_up()  # of bytes that nobody committed; the file is lost, these go to another
        if self._file is None or self._offset > ROLL_BYTES:
            self.sync()
            self._open()
        assert self._file is not None
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(self._file, view) :]
        except OSError as error:
            self._give_up()
            raise _full(self.folder, error) from error
        self._unflushed = True
        appended = Appended(self._uri, self._offset, data.size, num_rows, checksum(memoryview(data)))
        self._offset += data.size
        return appended

    def sync(self) -> None:
        flushing, self._flushing = self._flushing, None
        try:
            if flushing is not None:
                flushing.result()
            if self._unflushed and self._file is not None:
                os.fdatasync(self._file)
        except OSError as error:
            self._give_up()
            raise _full(self.folder, error) from error
        self._unflushed = False

    def roll(self) -> None:
        self._give_up()

    def close(self) -> None:
        self._give_up()
        self._flusher.shutdown()

    def _give_up(self) -> None:
        if self._flushing is not None:
            self._flushing.exception()  # the descriptor must stay open until the flush has ended
            self._flushing = None
        self._unflushed = False
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open(self) -> None:
        """A new file; nothing of this object changes before its name is durable too."""
        self._give_up()
        uri = f"{self._name}-{uuid.uuid4().hex[:12]}{_SUFFIX}"
        try:
            file = os.open(self.folder / uri, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            try:
                with contextlib.suppress(
                    OSError
                ):  # a filesystem without locks: the grace of compaction is all there is
                    fcntl.flock(file, fcntl.LOCK_EX)
                sync_path(self.folder)
            except OSError:
                os.close(file)
                (self.folder / uri).unlink(missing_ok=True)
                raise
        except OSError as error:
            raise _full(self.folder, error) from error
        self._file, self._uri, self._offset = file, uri, 0

    def _check_room(self, num_bytes: int) -> None:
        try:
            free = shutil.disk_usage(self.folder).free
        except OSError as error:
            raise _full(self.folder, error) from error
        if free - num_bytes < self.min_free_bytes:
            raise DiskFullError(
                f"the disk of the segments in {self.folder} has {free} bytes free",
                value=num_bytes,
                allowed=f"writes that leave at least buffer.min_free_bytes = {self.min_free_bytes}",
                todo="free some space, move buffer.segments, or lower buffer.min_free_bytes",
            )


def checksum(data: memoryview | bytes) -> str:
    """xxh3-64 of the bytes, hexadecimal."""
    return xxhash.xxh3_64_hexdigest(data)


def _corrupt(address: SegmentAddress, why: str) -> SegmentCorruptError:
    return SegmentCorruptError(
        f"segment {address.segment_id} ({address.length_bytes} bytes at {address.offset_bytes} of {address.uri})"
        f" cannot be served: {why}",
        segment_id=address.segment_id,
        todo="restore the file from a back-up; `rft doctor` lists every affected experience",
    )


def _full(folder: Path, error: OSError) -> RftError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFullError(
            f"the disk of the segments in {folder} is full", todo="free some space; nothing was half-written"
        )
    return BufferUnavailableError(
        f"the segments in {folder} cannot be written: {error.strerror}",
        todo="mend the disk or the folder's permissions; nothing was half-written",
    )
