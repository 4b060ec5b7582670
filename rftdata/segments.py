"""The data plane: token arrays in append-only Arrow segments.

A segment is one record batch, stored as a complete Arrow IPC *stream* (schema, batch, end) in some file at some offset,
addressed for ever by its id in `rft.segment`. A writer appends to a file of its own, makes the bytes durable, and only
then commits offset, length and checksum to SQL; bytes beyond a committed length mean nothing. Readers map files into
memory and read batches without copying. What the batches hold: `rftdata.arrays`.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import socket
import threading
import uuid
from abc import ABC, abstractmethod
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import xxhash

from rftdata.durable import give_back, sync_path
from rftdata.errors import BufferUnavailableError, DiskFullError, RftError, SegmentCorruptError

_ROLL_BYTES = 512 * 2**20


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


class SegmentAppender(ABC):
    """Appends batches to a place of its own; used by one thread at a time."""

    @abstractmethod
    def append(self, batch: pa.RecordBatch) -> Appended:
        """Write a batch and begin to make it durable; it is so when `sync` has returned.

        Raises:
            DiskFullError: not enough room; nothing of the batch will be seen.
        """

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
        """

    @abstractmethod
    def read_bytes(self, address: SegmentAddress) -> pa.Buffer:
        """The bytes at an address, checked against their checksum; for a back-up.

        Raises:
            SegmentCorruptError: as `read` with `verify`.
        """

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
    """

    def __init__(self, folder: Path, min_free_bytes: int = 0) -> None:
        self.folder = folder
        self.min_free_bytes = min_free_bytes
        try:
            if not folder.is_dir():
                folder.mkdir(parents=True, exist_ok=True)
                sync_path(folder.parent)
        except OSError as error:
            raise BufferUnavailableError(
                f"the folder of the segments cannot be made: {error.strerror}",
                value=str(folder),
                todo="correct buffer.segments",
            ) from error
        self._maps: OrderedDict[str, pa.MemoryMappedFile] = OrderedDict()
        self._lock = threading.Lock()

    def appender(self) -> SegmentAppender:
        return _PosixAppender(self.folder, self.min_free_bytes)

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
                why = (
                    "its file is missing"
                    if isinstance(error, FileNotFoundError)
                    else f"its file cannot be read: {error.strerror}"
                )
                raise _corrupt(address, why) from error
            self._maps.move_to_end(address.uri)
            if len(self._maps) > 256:
                self._maps.popitem(last=False)
            mapped.seek(address.offset_bytes)
            return mapped.read_buffer(address.length_bytes)


class _PosixAppender(SegmentAppender):
    """One writer's file. After an fsync error the file's state is unknown, so the appender gives up on it for good.

    The disk works while the caller goes on: flushing runs in a thread of its own between `append` and `sync`.
    """

    def __init__(self, folder: Path, min_free_bytes: int) -> None:
        self.folder = folder
        self.min_free_bytes = min_free_bytes
        self._file: io.FileIO | None = None
        self._uri = ""
        self._offset = 0
        self._flusher = ThreadPoolExecutor(1, thread_name_prefix="segment-flush")
        self._flushing: Future[None] | None = None

    def append(self, batch: pa.RecordBatch) -> Appended:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        data = sink.getvalue()
        self._check_room(data.size)
        if self._file is None or self._offset > _ROLL_BYTES:
            self.sync()
            self._open()
        assert self._file is not None
        try:
            view = memoryview(data)
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            self._give_up()
            raise _full(self.folder, error) from error
        self._flushing = self._flusher.submit(os.fdatasync, self._file.fileno())
        appended = Appended(self._uri, self._offset, data.size, batch.num_rows, checksum(memoryview(data)))
        self._offset += data.size
        return appended

    def sync(self) -> None:
        flushing, self._flushing = self._flushing, None
        if flushing is None:
            return
        try:
            flushing.result()
        except OSError as error:
            self._give_up()
            raise _full(self.folder, error) from error

    def close(self) -> None:
        self._give_up()
        self._flusher.shutdown()

    def _give_up(self) -> None:
        if self._flushing is not None:
            self._flushing.exception()  # the descriptor must stay open until the flush has ended
            self._flushing = None
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> None:
        """A new file; nothing of this object changes before its name is durable too."""
        self._give_up()
        uri = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:12]}.arrows"
        try:
            file = io.FileIO(self.folder / uri, "xb")
            try:
                sync_path(self.folder)
            except OSError:
                file.close()
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
