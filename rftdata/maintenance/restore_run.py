"""Restoration of archived runs: rows and arrays come back from the Parquet files exactly as they were.

1. Every file is compared with its checksum.
2. Segments are written again, durably. Their bytes have the checksums that they had.
3. One transaction fills rows and segments again and records that the run is restored.
4. The files are removed, then the record of the archive.

A process that is killed before the end of 3 leaves an archived run, and afterwards a restored one; the same command continues.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
from psycopg import sql

from rftdata.archives.arrays import rebuilt, runs_of_segments, schema_of
from rftdata.archives.files import ArchiveFolder, as_csv, row_groups
from rftdata.buffer import Buffer
from rftdata.errors import ArchivedError, QueryError, RftError
from rftdata.failpoints import failpoint
from rftdata.maintenance.archive import CHANGED_TABLES, lock_archives
from rftdata.maintenance.archive_writing import EXPERIENCE_TEXTS
from rftdata.maintenance.erasure import vacuum
from rftdata.postgres.database import Connection, Row, execute, fetch
from rftdata.run import Run
from rftdata.segments.base import Appended

# Destination of a file's rows: a staging table with its columns and the query that makes it, or the table itself with all columns.
_STAGED = {
    "experience": ("stage_experiences", "refill_experiences", EXPERIENCE_TEXTS),
    "group_prompt": ("stage_prompts", "refill_prompts", ("group_id", "prompt_digest", "prompt", "messages")),
    "group_baseline": ("stage_baselines", "refill_baselines", ("group_id", "response", "messages", "reward_parts")),
}
_WHOLE = ("score", "worklist")


@dataclass(frozen=True)
class RestorationResult:
    """A run that was restored, with the bytes of its segments; `num_experiences` is 0 if only leftovers were removed."""

    run: str
    num_experiences: int
    num_segments: int
    array_bytes: int


def restore_run(buffer: Buffer, name: str | int) -> RestorationResult:
    """Bring an archived run back, and remove its archive.

    Raises:
        QueryError: the run is not archived.
        ArchivedError: it shares arrays with an archived run, which must be restored first.
        RftError: a file is missing or damaged, and nothing was changed; or files cannot be removed, and the run is restored.
        ConflictError: another process is archiving or restoring.
    """
    run, folder = buffer.find_run(name), buffer.archives
    with lock_archives(buffer.database):
        archives = buffer.database.fetch("archive_of_run", run_id=run.run_id)
        if not archives:
            raise QueryError(f"the run {run.name!r} is not archived", todo="nothing was changed")
        done = RestorationResult(run.name, 0, 0, 0)
        if archives[0]["status"] == "archived":
            done = _bring_back(buffer, folder, run, archives[0])
        # The run is whole here: it was restored now or earlier, or never moved.
        try:
            folder.remove(run.run_id)
        except QueryError as error:
            raise RftError(
                f"the run {run.name!r} is whole in the database, but files of its archive cannot be removed: {error}",
                todo=f"run `rft restore-run {run.name}` again then",
            ) from error
        failpoint("restore.removed")
        buffer.database.run("forget_archive", run_id=run.run_id)
    buffer.reader.forget()
    if done.num_experiences:
        vacuum(buffer, rewrite=False, tables=CHANGED_TABLES)
    return done


def _bring_back(buffer: Buffer, folder: ArchiveFolder, run: Run, archive: Row) -> RestorationResult:
    run_id = run.run_id
    if lenders := [row["name"] for row in buffer.database.fetch("archived_lenders", run_id=run_id)]:
        raise ArchivedError(
            f"the run {run.name!r} shares arrays with archived runs: {', '.join(lenders)}",
            todo="; ".join(f"first `rft restore-run {name}`" for name in lenders),
        )
    files = buffer.database.fetch("archive_files", run_id=run_id)
    folder.check(files)
    segments = {row["segment_id"]: row for row in buffer.database.fetch("segments_of_archive", run_id=run_id)}
    written = _write_segments(buffer, folder, files, segments)
    failpoint("restore.appended")
    with buffer.database.transaction() as connection:
        fetch(connection, "lock_run", run_id=run_id)
        if not execute(connection, "finish_restoration", run_id=run_id):
            raise RftError(f"the archive of the run {run.name!r} was changed meanwhile", todo="run it again")
        fetch(connection, "allow_archive_changes")
        for row in files:
            if row["table_name"] in _WHOLE:
                _copy(connection, folder, row, sql.Identifier("rft", row["table_name"]), None)
        for table, (stage, refill, columns) in _STAGED.items():
            execute(connection, stage)
            of_table = [row for row in files if row["table_name"] == table]
            for row in of_table:
                _copy(connection, folder, row, sql.Identifier(f"archived_{table}"), columns)
            num_rows = sum(row["num_rows"] for row in of_table)
            if execute(connection, refill) != num_rows:
                raise RftError(
                    f"the archive of the run {run.name!r} has {num_rows} rows of {table}, and the database another number",
                    todo="`rft doctor` compares them; nothing was changed",
                )
        _commit_segments(connection, run, written)
        execute(connection, "forget_archive_files", run_id=run_id)
        failpoint("restore.moving")
    failpoint("restore.moved")
    return RestorationResult(run.name, archive["num_experiences"], len(written), archive["array_bytes"])


def _copy(
    connection: Connection, folder: ArchiveFolder, row: Row, target: sql.Composable, columns: Sequence[str] | None
) -> None:
    with folder.open(row["path"]) as opened:
        names = columns or opened.schema_arrow.names
        statement = sql.SQL("COPY {} ({}) FROM STDIN (FORMAT CSV)").format(
            target, sql.SQL(", ").join(map(sql.Identifier, names))
        )
        with connection.cursor() as cursor, cursor.copy(statement) as copy:
            for rows in row_groups(opened, names):
                copy.write(as_csv(rows.select(names)))


def _write_segments(
    buffer: Buffer, folder: ArchiveFolder, files: Sequence[Row], segments: dict[int, Row]
) -> dict[int, Appended]:
    """Write the segments of an archive to a new segment file, durably; return their places by id."""
    written: dict[int, Appended] = {}
    with contextlib.closing(buffer.segments.appender()) as appender:
        for segment_id, num_rows, data in _segments(folder, files):
            if segment_id not in segments or segments[segment_id]["num_rows"] != num_rows:
                raise RftError(f"segment {segment_id} of the archive has {num_rows} rows, but not in the database")
            written[segment_id] = appender.append_bytes(data, num_rows)
        appender.sync()
    if missing := segments.keys() - written.keys():
        raise RftError(
            f"segment {min(missing)} is in no file of the archive",
            todo="`rft doctor` compares them; nothing was changed",
        )
    return written


def _segments(folder: ArchiveFolder, files: Sequence[Row]) -> Iterator[tuple[int, int, pa.Buffer]]:
    """Yield (segment id, number of rows, bytes) of all segments of an archive, a row group in memory at a time."""
    with contextlib.ExitStack() as stack:
        groups = {
            row["path"]: row_groups(stack.enter_context(folder.open(row["path"])))
            for row in files
            if row["table_name"] == "experience"
        }
        for row in files:
            if row["table_name"] != "segment":
                continue
            for piece in row_groups(stack.enter_context(folder.open(row["path"]))):
                # They belong to one row group of one file of experiences, in order. Row groups of copies have none.
                records = {record["segment_id"]: record for record in piece.to_pylist()}
                for rows in groups[piece.column("path")[0].as_py()]:
                    places = [p for p in runs_of_segments(rows.column("segment_id").to_numpy()) if p[0] in records]
                    if places:
                        break
                for segment_id, start, end in places:
                    record = records[segment_id]
                    data = record["data"]
                    if data is None:
                        data = rebuilt(rows.slice(start, end - start), schema_of(record["ipc_schema"]))
                    yield segment_id, end - start, pa.py_buffer(data)


def _commit_segments(connection: Connection, run: Run, written: dict[int, Appended]) -> None:
    if not written:
        return
    places = list(written.values())
    uris, ends = [place.uri for place in places], [place.offset_bytes + place.length_bytes for place in places]
    fetch(connection, "register_files", uris=uris, sizes=ends)
    restored = execute(
        connection,
        "restore_segments",
        segment_ids=list(written),
        uris=uris,
        offsets=[place.offset_bytes for place in places],
        lengths=[place.length_bytes for place in places],
        checksums=[place.checksum for place in places],
    )
    if restored != len(written):
        raise RftError("a segment file was closed while arrays were written to it", todo="run it again")
    execute(connection, "forget_archived_segments", run_id=run.run_id)
