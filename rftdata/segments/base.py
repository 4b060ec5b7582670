"""The data plane: the interface of stores for token arrays in append-only Arrow segments.

A segment is one record batch, stored as a complete Arrow IPC *stream* (schema, batch, end) at some offset of some file, and
permanently identified by its id in `rft.segment`. A writer appends to its own file, makes the bytes durable, and only then
commits offset, length and checksum to SQL. Bytes beyond a committed length have no meaning. Readers map files into memory and
read batches without copying. `rftdata.segments.codec` defines the contents of batches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa
import xxhash

from rftdata.errors import BufferUnavailableError, SegmentCorruptError

# An appender starts a new file when its file is larger than this.
ROLL_BYTES = 512 * 2**20
# How long a reader may use an address, or a mapped file, before it asks the database again. Files whose segments were moved stay
# longer than this, because a mapped file on a shared filesystem becomes invalid as soon as another host removes it.
ADDRESS_MAX_AGE_S = 600.0


@dataclass(frozen=True, kw_only=True)
class SegmentAddress:
    """The current location of a segment's bytes."""

    segment_id: int
    uri: str
    offset_bytes: int
    length_bytes: int
    checksum: str


@dataclass(frozen=True, kw_only=True)
class Appended:
    """The result of an append: the file, the range and its checksum."""

    uri: str
    offset_bytes: int
    length_bytes: int
    num_rows: int
    checksum: str


@dataclass(frozen=True)
class StoredFile:
    """A file of a store: location, size, time since the last write, and whether its name marks it as this buffer's."""

    uri: str
    size_bytes: int
    age_s: float
    is_ours: bool


class SegmentAppender(ABC):
    """Appends segments to its own file; used by one thread at a time."""

    @abstractmethod
    def append(self, batch: pa.RecordBatch) -> Appended:
        """Write a batch; it is durable when `sync` has returned.

        Raises:
            DiskFullError: there is not enough space; nothing of the batch is visible.
        """

    @abstractmethod
    def append_bytes(self, data: pa.Buffer, num_rows: int) -> Appended:
        """Write a segment's bytes unchanged (a copy from elsewhere); durable when `sync` has returned.

        Raises:
            DiskFullError: there is not enough space; nothing of them is visible.
        """

    @abstractmethod
    def roll(self) -> None:
        """Close the file and continue with a new one. Unsynced data is lost."""

    @abstractmethod
    def sync(self) -> None:
        """Wait until everything appended is durable.

        Raises:
            DiskFullError, BufferUnavailableError: it is not durable, and nothing of it may be committed.
        """

    @abstractmethod
    def close(self) -> None: ...


class SegmentStore(ABC):
    """A store of segments."""

    @abstractmethod
    def appender(self) -> SegmentAppender: ...

    @abstractmethod
    def read(self, address: SegmentAddress, *, verify: bool = False) -> pa.RecordBatch:
        """Return the batch at an address.

        Raises:
            SegmentCorruptError: missing file, truncated range, checksum mismatch (with `verify`), undecodable bytes.
            BufferUnavailableError: the store, not just this segment, cannot be read.
        """

    @abstractmethod
    def read_bytes(self, address: SegmentAddress) -> pa.Buffer:
        """Return the bytes at an address after checking their checksum; raises as `read` does."""

    @abstractmethod
    def has_shrunk(self, uri: str, end: int) -> bool:
        """Return whether a file that was at least so long is shorter now: what was read of it must not be touched. A removed file has not shrunk."""

    @abstractmethod
    def files(self) -> Iterator[StoredFile]:
        """Yield every file of the store."""

    @abstractmethod
    def is_ours(self, uri: str) -> bool:
        """Return whether a file of this name would be this buffer's, which alone `cut`, `remove` and `erase` accept."""

    @abstractmethod
    def is_written(self, uri: str) -> bool:
        """Return whether a live appender on this host holds the file; False for one on another host, and for a missing file."""

    @abstractmethod
    def cut(self, uri: str, size_bytes: int) -> None:
        """Truncate a file to its first `size_bytes`, durably."""

    @abstractmethod
    def remove(self, uris: Iterable[str]) -> int:
        """Remove files durably, ignoring missing ones. Return the number of bytes freed."""

    def erase(self, uri: str, offset_bytes: int, length_bytes: int) -> None:
        """Overwrite bytes that no segment refers to and no reader can hold. A missing file is not an error.

        Raises:
            BufferUnavailableError: this kind of store does not support it, or the file cannot be written.
        """
        raise BufferUnavailableError(
            f"{type(self).__name__} cannot overwrite parts of a file",
            todo=f"remove the object {uri} once no segment is in it",
        )


def checksum(data: memoryview | bytes) -> str:
    """Return the xxh3-64 of the bytes, hexadecimal."""
    return xxhash.xxh3_64_hexdigest(data)


def corrupt(address: SegmentAddress, why: str) -> SegmentCorruptError:
    """Return the error that names a segment and what is wrong with it."""
    return SegmentCorruptError(
        f"segment {address.segment_id} ({address.length_bytes} bytes at {address.offset_bytes} of {address.uri})"
        f" cannot be served: {why}",
        segment_id=address.segment_id,
        todo="restore the file from a backup; `rft doctor` lists every affected experience",
    )
