"""The files of an archive: written from one snapshot, then read again and compared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import xxhash
from psycopg import IsolationLevel, sql

from rftdata.archives.arrays import SEGMENT_FIELDS, array_columns, rebuilt, runs_of_segments, schema_of
from rftdata.archives.files import ArchiveFile, ArchiveFolder, ParquetPart, as_csv, row_groups
from rftdata.buffer import Buffer
from rftdata.errors import RftError
from rftdata.postgres.arrow_copy import copy_batches
from rftdata.postgres.database import Connection, fetch
from rftdata.query.catalogue import tables
from rftdata.run import Run
from rftdata.segments.base import SegmentAddress, checksum
from rftdata.segments.reader import SegmentReader

# Bytes of arrays that are read together, of one row group, and of one file; and number of segments that are read together.
_CHUNK_BYTES, _GROUP_BYTES, _FILE_BYTES = 16 * 2**20, 32 * 2**20, 512 * 2**20
_CHUNK_SEGMENTS = 256
# Columns of an experience that the database loses, and columns that the view lacks.
EXPERIENCE_TEXTS = ("experience_id", "response", "response_messages", "reward_parts", "metrics")
_BESIDE_VIEW = {
    "prompt_digest": "bytea",
    "reward_final": "boolean",
    "response_messages": "jsonb",
}
# Tables whose rows of a run are archived as they are, with the join that finds them.
TABLES = {
    "group_prompt": "JOIN rft.rollout_group g ON g.group_id = t.group_id AND g.run_id = {run_id}",
    "group_baseline": "JOIN rft.rollout_group g ON g.group_id = t.group_id AND g.run_id = {run_id}",
    "score": "JOIN rft.experience e ON e.experience_id = t.experience_id JOIN rft.rollout_group g ON g.group_id = e.group_id AND g.run_id = {run_id}",
    "worklist": "JOIN rft.run r ON r.run_id = t.run_id AND r.run_id = {run_id}",
}


@dataclass
class WrittenArchive:
    """The files of an archive, written and verified.

    Attributes:
        fingerprint: of the rows in the snapshot.
        segments: checksums of the segments that the files replace, by id.
    """

    fingerprint: str = ""
    files: list[ArchiveFile] = field(default_factory=list)
    segments: dict[int, str] = field(default_factory=dict)


def write_archive(buffer: Buffer, folder: ArchiveFolder, run: Run) -> WrittenArchive:
    """Write and verify all files of a run's archive.

    Raises:
        RftError: what was read back is not what was written.
        SegmentCorruptError: arrays do not match their checksum.
        DiskFullError, QueryError: the files cannot be written.
    """
    written = WrittenArchive()
    experiences = _ExperienceFiles(buffer, folder, run)
    with buffer.database.transaction() as connection:
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        assert connection.isolation_level in (None, IsolationLevel.REPEATABLE_READ)
        written.fingerprint = fetch(connection, "archive_fingerprint", run_id=run.run_id)[0]["fingerprint"]
        experiences.borrowed = {row["segment_id"] for row in fetch(connection, "borrowed_segments", run_id=run.run_id)}
        experiences.write(connection)
        for table in TABLES:
            if file := _write_rows(buffer, folder, run, connection, table):
                written.files.append(file)
    written.files += experiences.files
    written.segments, segment_file = experiences.verify()
    written.files += segment_file
    return written


def _write_rows(
    buffer: Buffer, folder: ArchiveFolder, run: Run, connection: Connection, table: str
) -> ArchiveFile | None:
    """Write the run's rows of a table as they are; return None if there are none."""
    columns = tables(buffer.database)[table]
    source = sql.SQL("(SELECT t.* FROM {} t {}) AS rows").format(
        sql.Identifier("rft", table), sql.SQL(TABLES[table]).format(run_id=sql.Literal(run.run_id))
    )
    path = folder.new_file(table, run.name, run.run_id, 0)
    sent, part = xxhash.xxh3_64(), None
    with folder.disk_errors():
        for batch in copy_batches(connection, source, columns):
            rows = pa.Table.from_batches([batch])
            part = part or ParquetPart(folder.create_file(path), rows.schema)
            part.write(rows)
            sent.update(as_csv(rows))
        if part is None:
            return None
        part.close()
    file = folder.completed(path, table, part.num_rows)
    stored = xxhash.xxh3_64()
    with folder.open(path) as opened:
        for rows in row_groups(opened):
            stored.update(as_csv(rows))
    _compare(sent, stored, path)
    return file


def _compare(sent: xxhash.xxh3_64, stored: xxhash.xxh3_64, path: str) -> None:
    if sent.digest() != stored.digest():
        raise RftError(
            f"the archive file {path} does not hold what was written to it", todo="check the disk; the run is whole"
        )


@dataclass
class _Part:
    """A file of experiences with one set of arrays, and the rows that wait to become a row group."""

    path: str
    writer: ParquetPart
    sent: xxhash.xxh3_64 = field(default_factory=xxhash.xxh3_64)
    waiting: list[pa.Table] = field(default_factory=list)
    waiting_bytes: int = 0
    num_bytes: int = 0

    def add(self, rows: pa.Table) -> None:
        self.waiting.append(rows)
        self.waiting_bytes += rows.nbytes
        if self.waiting_bytes >= _GROUP_BYTES:
            self.flush()

    def flush(self) -> None:
        if self.waiting:
            rows = pa.concat_tables(self.waiting)
            self.writer.write(rows)
            self.sent.update(as_csv(rows.select(EXPERIENCE_TEXTS)))
            self.num_bytes += self.waiting_bytes
            self.waiting, self.waiting_bytes = [], 0


class _ExperienceFiles:
    """Writes the files of the table experience in the order of segments, a row group of whole segments at a time.

    Attributes:
        borrowed: segments that another run wrote, which are not replaced.
        files: the complete files.
    """

    def __init__(self, buffer: Buffer, folder: ArchiveFolder, run: Run) -> None:
        self.borrowed: set[int] = set()
        self.files: list[ArchiveFile] = []
        self._buffer, self._folder, self._run = buffer, folder, run
        self._reader = SegmentReader(buffer.database, buffer.segments, max_segments=_CHUNK_SEGMENTS)
        self._columns = {**tables(buffer.database)["v_experience"], **_BESIDE_VIEW, "purged": "boolean"}
        self._parts: dict[bytes, _Part] = {}
        self._digests: dict[str, xxhash.xxh3_64] = {}
        self._schemas: dict[int, bytes] = {}
        self._known_schemas: dict[bytes, bytes] = {}
        self._num_files = 0

    def write(self, connection: Connection) -> None:
        extra = sql.SQL(", ").join(sql.Identifier("e", name) for name in _BESIDE_VIEW)
        source = sql.SQL(
            "(SELECT v.*, {}, EXISTS (SELECT FROM rft.purged_experience x WHERE x.experience_id = e.experience_id) AS purged"
            " FROM rft.v_experience v JOIN rft.experience e USING (experience_id) WHERE v.run_id = {}"
            " ORDER BY e.segment_id, e.segment_row, e.experience_id) AS rows"
        ).format(extra, sql.Literal(self._run.run_id))
        with self._folder.disk_errors():
            for chunk in _chunks(_by_segment(copy_batches(connection, source, self._columns))):
                batches = self._reader.batches([segment_id for segment_id, _ in chunk])
                for segment_id, rows in chunk:
                    self._add(segment_id, rows, batches[segment_id])
            for part in list(self._parts.values()):
                self._close(part)

    def _add(self, segment_id: int, rows: pa.Table, batch: pa.RecordBatch) -> None:
        arrays = array_columns(batch, rows.column("segment_row").to_numpy(), self._columns)
        if segment_id not in self.borrowed:
            data = batch.schema.serialize().to_pybytes()
            self._schemas[segment_id] = self._known_schemas.setdefault(data, data)
        key = arrays.schema.serialize().to_pybytes()  # schemas that differ in their metadata alone count as equal
        part = self._parts.get(key)
        if part is None or part.num_bytes >= _FILE_BYTES:
            if part is not None:
                self._close(part)
            part = self._parts[key] = self._new_part(rows.schema, arrays.schema)
        for name in arrays.column_names:
            rows = rows.append_column(arrays.schema.field(name), arrays.column(name))
        part.add(rows)

    def _new_part(self, rows: pa.Schema, arrays: pa.Schema) -> _Part:
        path = self._folder.new_file("experience", self._run.name, self._run.run_id, self._num_files)
        self._num_files += 1
        return _Part(path, ParquetPart(self._folder.create_file(path), pa.schema([*rows, *arrays])))

    def _close(self, part: _Part) -> None:
        part.flush()
        part.writer.close()
        self._digests[part.path] = part.sent
        self.files.append(self._folder.completed(part.path, "experience", part.writer.num_rows))

    def verify(self) -> tuple[dict[int, str], list[ArchiveFile]]:
        """Read all files again; return the checksums of the segments that they replace, and the file of the table segment."""
        checksums: dict[int, str] = {}
        if not self._schemas:
            for file in self.files:
                self._verify_file(file, None, checksums)
            return checksums, []
        path = self._folder.new_file("segment", self._run.name, self._run.run_id, 0)
        with self._folder.disk_errors():
            part = ParquetPart(self._folder.create_file(path), SEGMENT_FIELDS)
            for file in self.files:
                self._verify_file(file, part, checksums)
            part.close()
        if missing := self._schemas.keys() - checksums.keys():
            raise RftError(f"segment {min(missing)} is in no archive file", todo="the run is whole; report this")
        return checksums, [self._folder.completed(path, "segment", part.num_rows)]

    def _verify_file(self, file: ArchiveFile, out: ParquetPart | None, checksums: dict[int, str]) -> None:
        stored = xxhash.xxh3_64()
        with self._folder.open(file.path) as opened:
            for rows in row_groups(opened):
                stored.update(as_csv(rows.select(EXPERIENCE_TEXTS)))
                places = list(runs_of_segments(rows.column("segment_id").to_numpy()))
                own = [place for place in places if place[0] in self._schemas]
                addresses = {
                    row["segment_id"]: SegmentAddress(**row)
                    for row in self._buffer.database.fetch("segment_addresses", segment_ids=[i for i, _, _ in own])
                }
                records = []
                for segment_id, start, end in own:
                    record, digest = self._segment(addresses[segment_id], rows.slice(start, end - start), file.path)
                    records.append(record)
                    checksums[segment_id] = digest
                if out is not None and records:
                    out.write(pa.Table.from_pylist(records, SEGMENT_FIELDS))
        _compare(self._digests[file.path], stored, file.path)

    def _segment(self, address: SegmentAddress, rows: pa.Table, path: str) -> tuple[dict[str, object], str]:
        """Rebuild a segment; return its row of the table segment, with its bytes if the rebuilt ones differ, and its checksum."""
        ipc_schema = self._schemas[address.segment_id]
        same = checksum(memoryview(rebuilt(rows, schema_of(ipc_schema)))) == address.checksum
        data = None if same else self._buffer.segments.read_bytes(address).to_pybytes()
        record = {
            "segment_id": address.segment_id,
            "num_rows": rows.num_rows,
            "path": path,
            "ipc_schema": ipc_schema,
            "data": data,
        }
        return record, address.checksum


def _by_segment(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[int, pa.Table]]:
    """Yield the rows of each segment, from rows in the order of segments."""
    open_id, pieces = -1, list[pa.RecordBatch]()
    for batch in batches:
        for segment_id, start, end in runs_of_segments(batch["segment_id"].to_numpy()):
            if segment_id != open_id and pieces:
                yield open_id, pa.Table.from_batches(pieces)
                pieces = []
            open_id = segment_id
            pieces.append(batch.slice(start, end - start))
    if pieces:
        yield open_id, pa.Table.from_batches(pieces)


def _chunks(segments: Iterator[tuple[int, pa.Table]]) -> Iterator[list[tuple[int, pa.Table]]]:
    """Yield the segments in chunks that are read together, limited by their number of tokens."""
    chunk: list[tuple[int, pa.Table]] = []
    size = 0
    for segment_id, rows in segments:
        chunk.append((segment_id, rows))
        size += 12 * int(np.sum(rows["num_prompt_tokens"].to_numpy() + rows["num_response_tokens"].to_numpy()))
        if size >= _CHUNK_BYTES or len(chunk) >= _CHUNK_SEGMENTS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
