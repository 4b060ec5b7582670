"""Segments in files in a folder, local or on a filesystem that every reader sees.

An appender holds an advisory lock (flock) on its file, which the kernel releases however the process ends. Other processes on the
host see from it whether the writer lives. The lock only protects a live writer's file from compaction. A writer is kept from appending to
a file that `rftdata.segments.compaction` will remove by `rft.segment_file.closed_at`, which the transaction that commits a segment checks.

Names of files come from rows: only plain names of plain files are accepted, and only this buffer's files are changed.
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
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa

from rftdata.errors import BufferUnavailableError, DiskFullError, RftError, is_disk_full
from rftdata.files.durable import make_folder, punch_hole, sync_path
from rftdata.files.plain import (
    check_file_name,
    file_name,
    is_file_name,
    open_plain,
    plain_size,
    plain_status,
    unlink_plain,
)
from rftdata.segments.base import (
    ADDRESS_MAX_AGE_S,
    ROLL_BYTES,
    Appended,
    SegmentAddress,
    SegmentAppender,
    SegmentStore,
    StoredFile,
    checksum,
    corrupt,
)
from rftdata.segments.file_mapping import FileMapping

_SUFFIX = ".arrows"


class PosixSegmentStore(SegmentStore):
    """Segments in files in a folder.

    Args:
        folder: created if missing.
        min_free_bytes: appends that would leave less free disk are refused.
        owner: prefix of file names, to distinguish buffers that share a folder; empty if the folder is this buffer's alone.
    """

    def __init__(self, folder: Path, min_free_bytes: int = 0, owner: str = "") -> None:
        self.folder = folder
        self.owner = owner
        self.min_free_bytes = min_free_bytes
        try:
            make_folder(folder)
        except OSError as error:
            raise BufferUnavailableError(
                f"the folder of the segments cannot be created: {error.strerror}",
                value=str(folder),
                todo="correct buffer.segments; for a command without a configuration: export RFT_SEGMENTS=FOLDER",
            ) from error
        self._maps: OrderedDict[str, tuple[FileMapping, pa.Buffer]] = OrderedDict()
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
            raise corrupt(address, f"its bytes are not an Arrow stream: {error}") from error

    def read_bytes(self, address: SegmentAddress) -> pa.Buffer:
        data = self._bytes(address)
        if checksum(memoryview(data)) != address.checksum:
            raise corrupt(address, "its bytes do not match their checksum")
        return data

    def has_shrunk(self, uri: str, end: int) -> bool:
        try:
            return plain_size(self.folder, uri) < end
        except OSError:
            return False

    def files(self) -> Iterator[StoredFile]:
        now = time.time()
        with os.scandir(self.folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    if entry.name.endswith(_SUFFIX) and entry.is_file(follow_symlinks=False):
                        status = entry.stat(follow_symlinks=False)
                        yield StoredFile(entry.name, status.st_size, now - status.st_mtime, self.is_ours(entry.name))

    def is_ours(self, uri: str) -> bool:
        return is_file_name(uri) and uri.startswith(f"{self.owner}-" if self.owner else "")

    def is_written(self, uri: str) -> bool:
        check_file_name(uri)
        try:
            descriptor = open_plain(self.folder, uri)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # a filesystem without locks: only compaction's grace period protects the file
            return False
        finally:
            os.close(descriptor)
        return False

    def cut(self, uri: str, size_bytes: int) -> None:
        self._check_ours(uri)
        try:
            descriptor = open_plain(self.folder, uri, os.O_WRONLY)
            try:
                os.ftruncate(descriptor, size_bytes)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise _full(self.folder, error) from error

    def remove(self, uris: Iterable[str]) -> int:
        freed = 0
        try:
            for uri in uris:
                self._check_ours(uri)
                with contextlib.suppress(FileNotFoundError):
                    size = plain_size(self.folder, uri)
                    unlink_plain(self.folder, uri)
                    freed += size
                with self._lock:
                    self._maps.pop(uri, None)
            sync_path(self.folder)
        except OSError as error:
            raise _full(self.folder, error) from error
        return freed

    def erase(self, uri: str, offset_bytes: int, length_bytes: int) -> None:
        self._check_ours(uri)
        try:
            with os.fdopen(open_plain(self.folder, uri, os.O_RDWR), "r+b") as file:
                file.seek(offset_bytes)
                left = length_bytes
                while left > 0:
                    left -= file.write(bytes(min(left, 2**20)))
                file.flush()
                os.fdatasync(file.fileno())
                punch_hole(file.fileno(), offset_bytes, length_bytes)
        except FileNotFoundError:
            return
        except OSError as error:
            raise _full(self.folder, error) from error

    def _check_ours(self, uri: str) -> None:
        """Refuse to change a file of another buffer in the same folder, or outside the folder."""
        check_file_name(uri)
        if not self.is_ours(uri):
            raise RftError(
                "a row of the database names a segment file of another buffer",
                value=uri,
                allowed=f"{self.owner}-…{_SUFFIX}",
                todo="the file was not changed; find out who wrote the row",
            )

    def _bytes(self, address: SegmentAddress) -> pa.Buffer:
        check_file_name(address.uri)
        if address.offset_bytes < 0 or address.length_bytes <= 0:
            raise corrupt(address, "it is no range of a file")
        end = address.offset_bytes + address.length_bytes
        with self._lock:
            if time.monotonic() - self._maps_since > ADDRESS_MAX_AGE_S:
                # Otherwise the space of removed files would be held for the life of this process.
                self._maps.clear()
                self._maps_since = time.monotonic()
            mapping, content = self._maps.get(address.uri, (None, None))
            try:
                # Checked every time: touching mapped bytes beyond the end of a truncated file kills the process.
                status = plain_status(self.folder, address.uri)
                if status.st_size < end:
                    raise corrupt(address, f"its file is only {status.st_size} bytes long")
                # A file that grew after it was mapped, or was replaced, is mapped again.
                same = mapping is not None and mapping.inode == (status.st_dev, status.st_ino)
                if mapping is None or content is None or not same or mapping.size < end:
                    mapping = _mapped(self.folder, address.uri)
                    content = pa.foreign_buffer(mapping.address, mapping.size, base=mapping)
                    self._maps[address.uri] = mapping, content
            except OSError as error:
                raise self._unreadable(address, error) from error
            self._maps.move_to_end(address.uri)
            if len(self._maps) > 256:
                self._maps.popitem(last=False)
            return content.slice(address.offset_bytes, address.length_bytes)

    def _unreadable(self, address: SegmentAddress, error: OSError) -> RftError:
        """Return damage of one segment, or of the folder, which must not be reported as damage of each segment."""
        if error.errno == errno.EIO:
            return corrupt(address, f"its file cannot be read: {error.strerror}")
        if error.errno in (errno.ELOOP, errno.EINVAL):
            return corrupt(address, "its file is a symbolic link, or not a plain file")
        if error.errno == errno.ENOENT and self.folder.is_dir() and any(True for _ in self.files()):
            return corrupt(address, "its file is missing")
        if error.errno == errno.ENOMEM:
            return BufferUnavailableError(
                "a segment file cannot be mapped: this process has too many mappings, or too little address space",
                value=address.uri,
                todo="raise vm.max_map_count, or the limit on address space (ulimit -v)",
            )
        why = "it is missing or empty" if error.errno == errno.ENOENT else str(error.strerror)
        return BufferUnavailableError(
            f"the folder of the segments cannot be read: {why}",
            value=str(self.folder),
            todo="mount it, correct its permissions, or correct buffer.segments",
        )


class _PosixAppender(SegmentAppender):
    """One writer's file. After an fsync error the file's state is unknown, so the appender abandons it."""

    def __init__(self, folder: Path, min_free_bytes: int, owner: str) -> None:
        self.folder = folder
        self._name = f"{f'{owner}-' if owner else ''}{file_name(socket.gethostname())}-{os.getpid()}"
        self.min_free_bytes = min_free_bytes
        self._file: int | None = None
        self._uri = ""
        self._offset = 0
        self._unflushed = False

    def append(self, batch: pa.RecordBatch) -> Appended:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        return self.append_bytes(sink.getvalue(), batch.num_rows)

    def append_bytes(self, data: pa.Buffer, num_rows: int) -> Appended:
        self._check_room(data.size)
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
        appended = Appended(
            uri=self._uri,
            offset_bytes=self._offset,
            length_bytes=data.size,
            num_rows=num_rows,
            checksum=checksum(memoryview(data)),
        )
        self._offset += data.size
        return appended

    def sync(self) -> None:
        try:
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

    def _give_up(self) -> None:
        self._unflushed = False
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open(self) -> None:
        """Open a new file; the object changes only after the file's name is durable."""
        self._give_up()
        uri = f"{self._name}-{uuid.uuid4().hex[:12]}{_SUFFIX}"
        try:
            file = open_plain(self.folder, uri, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                with contextlib.suppress(
                    OSError
                ):  # a filesystem without locks: only compaction's grace period protects the file
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


def _mapped(folder: Path, uri: str) -> FileMapping:
    """Map a whole file, which is not empty, for reading."""
    descriptor = open_plain(folder, uri)
    try:
        return FileMapping(descriptor)
    finally:
        os.close(descriptor)


def _full(folder: Path, error: OSError) -> RftError:
    if is_disk_full(error):
        return DiskFullError(
            f"the disk of the segments in {folder} is full", todo="free some space; nothing was written partially"
        )
    return BufferUnavailableError(
        f"the segments in {folder} cannot be written: {error.strerror}",
        todo="repair the disk or correct the folder's permissions; nothing was written partially",
    )
