"""The data plane: token arrays in append-only Arrow segments; what every place for them has in common.

A segment is one record batch, stored as a complete Arrow IPC *stream* (schema, batch, end) in some file at some offset,
addressed for ever by its id in `rft.segment`. A writer appends to a file of its own, makes the bytes durable, and only
then commits offset, length and checksum to SQL; bytes beyond a committed length mean nothing. Readers map files into
memory and read batches without copying. What the batches hold: `rftdata.segments.codec`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa
import xxhash

from rftdata.errors import BufferUnavailableError, SegmentCorruptError

# An appender goes on in a new file when its file is larger than this.
ROLL_BYTES = 512 * 2**20
# How long a reader may use an address, or a mapped file, before it asks the database again. Files that were moved elsewhere stay
# for a grace longer than this: on a shared filesystem a mapped file that another host removes is gone at once.
ADDRESS_MAX_AGE_S = 600.0


@dataclass(frozen=True, kw_only=True)
class SegmentAddress:
    """Where a segment's bytes are now."""

    segment_id: int
    uri: str
    offset_bytes: int
    length_bytes: int
    checksum: str


@dataclass(frozen=True, kw_only=True)
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
        """Write a batch; it is durable when `sync` has returned.

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


def checksum(data: memoryview | bytes) -> str:
    """xxh3-64 of the bytes, hexadecimal."""
    return xxhash.xxh3_64_hexdigest(data)


def corrupt(address: SegmentAddress, why: str) -> SegmentCorruptError:
    """The error that names a segment and what is wrong with it."""
    return SegmentCorruptError(
        f"segment {address.segment_id} ({address.length_bytes} bytes at {address.offset_bytes} of {address.uri})"
        f" cannot be served: {why}",
        segment_id=address.segment_id,
        todo="restore the file from a back-up; `rft doctor` lists every affected experience",
    )
