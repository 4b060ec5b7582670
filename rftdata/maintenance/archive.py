"""Archiving of finished runs: texts, arrays and scores move to Parquet files, and everything else stays where it is.

1. A row of rft.archive records that files are being written. Claims of processes that were lost end: what they write later is refused.
2. One snapshot is written to files, which are made durable, read again, and compared: texts with what the database sent, arrays with the
   checksums of their segments, byte for byte.
3. One transaction locks the run's rows, refuses if one has changed since the snapshot, empties or deletes what the files hold, records
   the files with their checksums, and waits at its end for transactions that insert rows. From then on the database refuses new rows.

A process that is killed before the end of 3 leaves a run that is whole; the same command then starts again with new files. Files of
segments are removed by compaction, after its grace period. See docs/decisions/0036.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from dataclasses import dataclass

from rftdata.archives.files import ArchiveFile, ArchiveFolder
from rftdata.buffer import Buffer
from rftdata.errors import ArchivedError, ConflictError, DiskFullError, QueryError, RftError
from rftdata.failpoints import failpoint
from rftdata.maintenance.archive_writing import WrittenArchive, write_archive
from rftdata.maintenance.erasure import vacuum
from rftdata.postgres.database import Connection, Database, Row, execute, fetch
from rftdata.postgres.locks import Lock, holding
from rftdata.run import Run
from rftdata.segments.compaction import Compactor

CHANGED_TABLES = (
    "rft.experience",
    "rft.group_prompt",
    "rft.group_baseline",
    "rft.score",
    "rft.worklist",
    "rft.segment",
)
_ENDED = ("finished", "interrupted", "failed")


@dataclass(frozen=True)
class ArchiveResult:
    """A run that was archived: what its files hold, and the bytes of segments that they replace."""

    run: str
    num_groups: int
    num_experiences: int
    num_files: int
    file_bytes: int
    array_bytes: int
    folder: str


def archive(buffer: Buffer, name: str | int, *, author: str, rewrite_tables: bool = False) -> ArchiveResult:
    """Move what a finished run no longer needs in the database to Parquet files.

    Args:
        name: name or id of the run.
        rewrite_tables: return the freed space of the tables to the disk, which locks them meanwhile. Otherwise new rows use it.

    Raises:
        ArchivedError: the run is archived already.
        QueryError: the run has not ended, people have not answered its questions, or other runs need its experiences.
        ConflictError: rows changed meanwhile, or another process is archiving; the run is whole.
    """
    run = buffer.find_run(name)
    folder = buffer.archives
    with lock_archives(buffer.database):
        with buffer.database.transaction() as connection:
            fetch(connection, "lock_run", run_id=run.run_id)
            _refuse_unless_ready(connection, run)
            execute(connection, "end_claims_of_run", run_id=run.run_id)
            started_at = fetch(connection, "begin_archive", run_id=run.run_id, author=author)[0]["started_at"]
        failpoint("archive.begun")
        folder.remove(run.run_id)
        try:
            written = write_archive(buffer, folder, run)
            failpoint("archive.written")
            with buffer.database.transaction() as connection:
                _move(connection, run, written, started_at)
                failpoint("archive.moving")
        except BaseException:
            with contextlib.suppress(RftError):
                _give_up(buffer.database, folder, run, started_at)
            raise
        failpoint("archive.moved")
    buffer.reader.forget()
    vacuum(buffer, rewrite=rewrite_tables, tables=CHANGED_TABLES)
    # Retires the files of the segments, which a later compaction removes when no reader can map them any more.
    with contextlib.suppress(DiskFullError):  # small files stay as they are until there is room to merge them
        Compactor(buffer.database, buffer.segments, grace_s=buffer.config.compaction_grace_s).run()
    row = buffer.database.fetch("archive_of_run", run_id=run.run_id)[0]
    return ArchiveResult(
        run.name,
        row["num_groups"],
        row["num_experiences"],
        len(written.files),
        sum(file.num_bytes for file in written.files),
        row["array_bytes"],
        str(folder.folder),
    )


def _give_up(database: Database, folder: ArchiveFolder, run: Run, started_at: datetime.datetime) -> None:
    """Remove what was written, unless the last transaction has committed after all, or another command has begun since."""
    if database.run("give_up_archive", run_id=run.run_id, started_at=started_at):
        folder.remove(run.run_id)


@contextlib.contextmanager
def lock_archives(database: Database) -> Iterator[None]:
    """Let one process archive or restore runs of a buffer at a time.

    Raises:
        ConflictError: another one does.
    """
    with holding(database, Lock("archive")) as held_by:
        if held_by is not None:
            raise ConflictError(
                f"another process is archiving or restoring a run of this buffer: {held_by}",
                todo="run it again when it has finished",
            )
        yield


def _refuse_unless_ready(connection: Connection, run: Run) -> None:
    for row in fetch(connection, "archive_of_run", run_id=run.run_id):
        if row["status"] == "archived":
            raise ArchivedError(
                f"the run {run.name!r} is archived already, since {row['archived_at']:%Y-%m-%d %H:%M}",
                todo=f"nothing was changed; `rft restore-run {run.name}` brings it back",
            )
        if row["status"] == "restored":
            raise ArchivedError(
                f"the files of the last archive of the run {run.name!r} are still there",
                todo=f"`rft restore-run {run.name}` removes them",
            )
    obstacles = fetch(connection, "archive_obstacles", run_id=run.run_id)[0]
    _refuse_unless_ended(run, obstacles)
    if obstacles["num_reviews"]:
        raise QueryError(
            f"{obstacles['num_reviews']} questions about experiences of the run {run.name!r} wait for an answer of a person",
            allowed="a run whose questions are answered or past their deadline",
            todo='answer them (`rft sql "select * from rft.v_review_queue"`), or wait',
        )
    if obstacles["sharers"]:
        names = ", ".join(obstacles["sharers"])
        raise QueryError(
            f"forks use the arrays of the run {run.name!r}",
            value=names,
            allowed="a run whose forks are archived",
            todo=f"archive these first: {names}",
        )
    if obstacles["selecting"]:
        names = ", ".join(obstacles["selecting"])
        raise QueryError(
            f"runs that have not ended train on experiences of the run {run.name!r}",
            value=names,
            todo="wait until they have ended",
        )


def _refuse_unless_ended(run: Run, obstacles: Row) -> None:
    active = obstacles["trainer"] or obstacles["worker"]
    imported = run.was_imported and obstacles["status"] == "created"
    if active is None and (obstacles["status"] in _ENDED or imported):
        return
    if active:
        todo = "wait for its end, or stop it (Ctrl-C of `rft run`)"
    else:
        todo = f"no process works for it: resume it, or record its end in Python: buffer.find_run({run.name!r}).end('interrupted', 'why')"
    raise QueryError(
        f"the run {run.name!r} has not ended" + (f": {active} works for it" if active else ""),
        value=obstacles["status"],
        allowed="a run that is finished, interrupted or failed",
        todo=todo,
    )


def _move(connection: Connection, run: Run, written: WrittenArchive, started_at: datetime.datetime) -> None:
    """Empty or delete what the verified files hold, in the caller's transaction.

    Args:
        started_at: of the archive. If the lock was lost with its connection, another command may have begun since, and removed the files.
    """
    run_id = run.run_id
    fetch(connection, "lock_run", run_id=run_id)
    fetch(connection, "lock_archived_rows", run_id=run_id)
    _refuse_unless_ready(connection, run)
    execute(connection, "end_claims_of_run", run_id=run_id)
    counts = fetch(connection, "rows_of_archive", run_id=run_id)[0]
    if fetch(connection, "archive_fingerprint", run_id=run_id)[0]["fingerprint"] != written.fingerprint:
        raise _changed(run)
    totals = fetch(connection, "archive_totals", run_id=run_id)[0]
    fetch(connection, "allow_archive_changes")
    # The same text as in the views, so that a reader in SQL sees where the text is.
    marker = f"[archived: rft restore-run {run.name}]"
    execute(connection, "delete_archived_scores", run_id=run_id)
    execute(connection, "delete_archived_work", run_id=run_id)
    for name in ("empty_experiences", "empty_prompts", "empty_baselines"):
        execute(connection, name, run_id=run_id, marker=marker)
    moved = execute(
        connection,
        "move_segments_to_archive",
        run_id=run_id,
        segment_ids=list(written.segments),
        checksums=list(written.segments.values()),
    )
    if moved != len(written.segments):
        raise _changed(run)
    for file in written.files:
        _record(connection, run_id, file)
    # Only now, since every insert waits for the rest of this transaction. From here on the database refuses those into this run.
    fetch(connection, "limit_archive_wait")
    execute(connection, "await_inserts")
    if fetch(connection, "rows_of_archive", run_id=run_id)[0] != {**counts, "scores": 0, "items": 0}:
        raise _changed(run)
    if not execute(connection, "finish_archive", run_id=run_id, started_at=started_at, **totals):
        raise _changed(run)


def _record(connection: Connection, run_id: int, file: ArchiveFile) -> None:
    execute(
        connection,
        "insert_archive_file",
        run_id=run_id,
        path=file.path,
        table_name=file.table_name,
        num_rows=file.num_rows,
        num_bytes=file.num_bytes,
        checksum=file.checksum,
    )


def _changed(run: Run) -> ConflictError:
    return ConflictError(
        f"rows of the run {run.name!r} changed while its archive was written", todo="run it again; the run is whole"
    )
