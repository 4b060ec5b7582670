"""Reading of segments: columns of experiences by their address, in the files that a process has mapped."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa

from rftdata.errors import ArchivedError, BufferUnavailableError, QueryError, SegmentCorruptError
from rftdata.postgres.database import Database
from rftdata.segments.base import ADDRESS_MAX_AGE_S, SegmentAddress, SegmentStore
from rftdata.segments.codec import SCHEMA, SHAPE_SUFFIX, Array, ColumnReader, purged_rows

# Segments that a reader keeps mapped, at least those of one call. Each takes 10 KiB in small pieces, which lie between what a trainer allocates for each
# batch: with 4,096, its process grew by 120 MiB.
_MAX_SEGMENTS = 512


class SegmentReader:
    """Reads rows of segments.

    A segment's content changes in one way only: a purge writes it again, elsewhere, with rows emptied. Its address may change at any
    time. Addresses, and the memory mapped at them, are therefore used for at most `max_age_s` seconds, much less than old bytes stay.
    If an address no longer holds the segment, the database is asked for the new one.
    """

    def __init__(
        self,
        database: Database,
        store: SegmentStore,
        *,
        max_age_s: float = ADDRESS_MAX_AGE_S,
        max_segments: int = _MAX_SEGMENTS,
    ) -> None:
        self._max_age_s = max_age_s
        self._max_segments = max_segments
        self._database = database
        self._store = store
        self._batches: dict[int, pa.RecordBatch] = {}
        self._read_at: dict[int, SegmentAddress] = {}
        self._purged: dict[int, frozenset[int]] = {}
        self._columns: dict[tuple[int, str], ColumnReader | None] = {}
        self._since = time.monotonic()
        self._lock = threading.Lock()

    def batches(self, segment_ids: Sequence[int]) -> dict[int, pa.RecordBatch]:
        """Return record batches by segment id.

        Raises:
            SegmentCorruptError: a segment is unknown or cannot be served; names its experiences.
            ArchivedError: the run of a segment is archived.
            BufferUnavailableError: the folder of the segments cannot be read.
        """
        batches, damaged = self._load(segment_ids)
        if damaged:
            raise self.with_experiences(damaged)[0]
        return batches

    def intact(self, segment_ids: Sequence[int]) -> tuple[dict[int, pa.RecordBatch], list[SegmentCorruptError]]:
        """Return the record batches that can be served, by segment id, and an error, with the affected experiences, for each other.

        Raises:
            BufferUnavailableError: the folder of the segments cannot be read.
        """
        batches, damaged = self._load(segment_ids)
        return batches, self.with_experiences(damaged)

    def damaged(self, segment_ids: Sequence[int]) -> list[SegmentCorruptError]:
        """Read segments; return an error, with the affected experiences, for each that cannot be served.

        Raises:
            BufferUnavailableError: the folder of the segments cannot be read.
        """
        return self.intact(segment_ids)[1]

    def _load(self, segment_ids: Sequence[int]) -> tuple[dict[int, pa.RecordBatch], list[SegmentCorruptError]]:
        self._database.refuse_other_process()
        with self._lock:
            if len(self._batches) > self._max_segments or time.monotonic() - self._since > self._max_age_s:
                self._forget_all()
            self._forget_shrunk(segment_ids)
            wanted = sorted(set(segment_ids) - set(self._batches))
            damaged = []
            addresses = self._addresses(wanted) if wanted else {}
            if len(addresses) < len(wanted):
                self._refuse_archived(set(wanted) - set(addresses))
            for segment_id in wanted:
                try:
                    if segment_id not in addresses:
                        raise SegmentCorruptError(
                            f"segment {segment_id} is not in rft.segment",
                            segment_id=segment_id,
                            todo="`rft doctor` lists every affected experience",
                        )
                    batch = self._batches[segment_id] = self.read(addresses[segment_id])
                    self._read_at[segment_id] = addresses[segment_id]
                    self._purged[segment_id] = purged_rows(batch)
                except SegmentCorruptError as error:
                    damaged.append(error)
            return {i: self._batches[i] for i in segment_ids if i in self._batches}, damaged

    def _refuse_archived(self, segment_ids: set[int]) -> None:
        for row in self._database.fetch("archive_of_segments", segment_ids=sorted(segment_ids)):
            raise ArchivedError(
                f"the run {row['run']!r} is archived: the arrays of segment {row['segment_id']} are in its files",
                todo=f"`rft query` reads them there; bring the run back with `rft restore-run {row['run']}`",
            )

    def read(self, address: SegmentAddress) -> pa.RecordBatch:
        """Return the batch at an address, or at the address to which it was moved since.

        Raises:
            SegmentCorruptError, BufferUnavailableError: see `SegmentStore.read`.
        """
        while True:
            try:
                return self._store.read(address, verify=True)
            except (SegmentCorruptError, BufferUnavailableError):
                now = self._addresses([address.segment_id]).get(address.segment_id)
                if now is None or now == address:
                    raise
                address = now

    def with_experiences(self, errors: Sequence[SegmentCorruptError]) -> list[SegmentCorruptError]:
        """Return the errors with the experiences of each segment."""
        if not errors:
            return []
        rows = self._database.fetch("experiences_of_segments", segment_ids=[error.segment_id for error in errors])
        experiences = {row["segment_id"]: row["experience_ids"] for row in rows}
        return [error.naming(experiences.get(error.segment_id, [])) for error in errors]

    def _addresses(self, segment_ids: Sequence[int]) -> dict[int, SegmentAddress]:
        rows = self._database.fetch("segment_addresses", segment_ids=list(segment_ids))
        return {row["segment_id"]: SegmentAddress(**row) for row in rows}

    def _forget_shrunk(self, segment_ids: Sequence[int]) -> None:
        ends = dict[str, int]()
        for address in (self._read_at[i] for i in segment_ids if i in self._read_at):
            ends[address.uri] = max(ends.get(address.uri, 0), address.offset_bytes + address.length_bytes)
        # All of them: this is damage, and rare.
        if any(self._store.has_shrunk(uri, end) for uri, end in ends.items()):
            self._forget_all()

    def _forget_all(self) -> None:
        for cache in (self._batches, self._read_at, self._purged, self._columns):
            cache.clear()
        self._since = time.monotonic()

    def forget(self) -> None:
        """Forget all cached segments."""
        with self._lock:
            self._forget_all()

    def places(self, experience_ids: Sequence[int]) -> list[tuple[int, int]]:
        """Return (segment id, row in it) of each experience.

        Raises:
            QueryError: an experience does not exist.
        """
        rows = self._database.fetch("experience_addresses", experience_ids=list(experience_ids))
        place = {row["experience_id"]: (row["segment_id"], row["segment_row"]) for row in rows}
        missing = [i for i in experience_ids if i not in place]
        if missing:
            raise QueryError("unknown experience", value=missing[0])
        return [place[i] for i in experience_ids]

    def purged(self, places: Sequence[tuple[int, int]]) -> list[int]:
        """Return which of the given (segment id, row) places, by their index, were purged."""
        return self._purged_among(self.batches([segment_id for segment_id, _ in places]), places)

    def _purged_among(self, batches: dict[int, pa.RecordBatch], places: Sequence[tuple[int, int]]) -> list[int]:
        with self._lock:
            purged = {i: self._purged[i] if i in self._purged else purged_rows(batch) for i, batch in batches.items()}
        marked = {i: rows for i, rows in purged.items() if rows}
        if not marked:  # nearly always
            return []
        return [i for i, (segment_id, row) in enumerate(places) if row in marked.get(segment_id, ())]

    def take(self, places: Sequence[tuple[int, int]], columns: Sequence[str]) -> pa.Table:
        """Return rows at (segment id, row) places, in that order, as list columns; null if a row lacks the array or was purged."""
        batches = self.batches([segment_id for segment_id, _ in places])
        purged = set(self._purged_among(batches, places))
        arrays = {}
        for column in columns:
            types = {batch.schema.field(column).type for batch in batches.values() if column in batch.schema.names}
            if column in SCHEMA.names and not types:
                types = {SCHEMA.field(column).type}
            if not types:
                raise _no_such_array(column, batches.values())
            kind = max(types, key=str)  # a large list if one of them is
            pieces = [
                _as_type(batches[segment_id].column(column).slice(row, 1), kind)
                if column in batches[segment_id].schema.names and i not in purged
                else pa.nulls(1, kind)
                for i, (segment_id, row) in enumerate(places)
            ]
            arrays[column] = pa.chunked_array(pieces, type=kind).combine_chunks()
        return pa.table(arrays) if columns else pa.table({})

    def arrays(self, places: Sequence[tuple[int, int]], name: str) -> list[Array | None]:
        """Return one array of each place in its own shape, as a view; None if it has none, or it was purged."""
        purged = set(self.purged(places))
        readers = self.columns(sorted({segment_id for segment_id, _ in places}), name, needed=False)
        addressed = [(i, readers[segment_id], row) for i, (segment_id, row) in enumerate(places)]
        return [None if reader is None or i in purged else reader.row(row) for i, reader, row in addressed]

    def columns(self, segment_ids: Sequence[int], name: str, *, needed: bool = True) -> dict[int, ColumnReader | None]:
        """Return one column of some segments; None for those without it.

        Raises:
            QueryError: no segment has it, and it is needed.
        """
        batches = self.batches(segment_ids)
        with self._lock:
            for segment_id, batch in batches.items():
                if (segment_id, name) not in self._columns:
                    column = ColumnReader(batch, name) if name in batch.schema.names else None
                    self._columns[segment_id, name] = column
            readers = {segment_id: self._columns[segment_id, name] for segment_id in batches}
        if needed and readers and not any(readers.values()):
            raise _no_such_array(name, batches.values())
        return readers

    def all_addresses(self) -> Iterator[tuple[SegmentAddress, int]]:
        """Yield every segment with the number of rows it should have."""
        for row in self._database.fetch("all_segments"):
            num_rows = row.pop("num_rows")
            yield SegmentAddress(**row), num_rows


def _as_type(array: pa.Array, kind: pa.DataType) -> pa.Array:
    return array if array.type == kind else array.cast(kind)


def _no_such_array(name: str, batches: Iterable[pa.RecordBatch]) -> QueryError:
    names = sorted({column for batch in batches for column in batch.schema.names if not column.endswith(SHAPE_SUFFIX)})
    return QueryError("unknown array", value=name, allowed=", ".join(names))
