"""Names of files that come from rows: no row makes a verb read, write or remove a file that is not this buffer's."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

from rftdata import Buffer
from rftdata.config import BufferConfig
from rftdata.errors import RftError, SegmentCorruptError
from rftdata.maintenance import backup, erasure, purge
from rftdata.maintenance.archive import archive
from rftdata.maintenance.restore_run import restore_run
from rftdata.maintenance.verification import verify
from rftdata.segments.base import SegmentAddress
from rftdata.segments.compaction import Compactor
from rftdata.segments.posix import PosixSegmentStore
from tests.support.store_roles import own_group

HOSTILE = ["../victim.txt", "/etc/hostname", "a/b.arrows", "a/../b", ".", "..", "", ".hidden", "a\nb", "a b", "x" * 300]
# Columns with addresses of models and of files that a person named: only their readers open them, and nothing is removed by them.
ELSEWHERE = {
    ("policy_version", "uri"),
    ("checkpoint", "uri"),
    ("run_model", "uri"),
    ("evaluation", "uri"),
    ("import_file", "path"),
}
INSERTS = {
    "segment_file": "INSERT INTO rft.segment_file (uri, size_bytes) VALUES (%s, 1)",
    "retired_range": "INSERT INTO rft.retired_range (purge_id, uri, offset_bytes, length_bytes) VALUES (1, %s, 0, 1)",
    "archive_file": (
        "INSERT INTO rft.archive_file (run_id, path, table_name, num_rows, num_bytes, checksum) VALUES (1, %s, 'experience', 1, 1, '')"
    ),
}
TEXT = b"not an experience, and longer than the range that a row names"

Operation = Callable[[PosixSegmentStore, str], object]
OPERATIONS: dict[str, Operation] = {
    "read": lambda store, uri: store.read(address(uri)),
    "read_bytes": lambda store, uri: store.read_bytes(address(uri)),
    "is_written": lambda store, uri: store.is_written(uri),
    "cut": lambda store, uri: store.cut(uri, 1),
    "remove": lambda store, uri: store.remove([uri]),
    "erase": lambda store, uri: store.erase(uri, 0, 8),
}


def address(uri: str) -> SegmentAddress:
    return SegmentAddress(segment_id=1, uri=uri, offset_bytes=0, length_bytes=8, checksum="0")


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file beside the folder of the segments."""
    file = tmp_path / "victim.txt"
    file.write_bytes(TEXT)
    return file


@pytest.fixture
def stored(buffer: Buffer) -> Buffer:
    """A finished run with two groups."""
    run = buffer.create_run(name="r", config={}, seed=1, steps=1, pipeline_version="none", mode="train")
    with buffer.writer(run) as writer:
        writer.insert(own_group(task_key="a"), own_group(task_key="b"))
    run.end("finished", "for the test")
    return buffer


def segments(buffer: Buffer) -> Path:
    return Path(str(buffer.config.segments))


def only_file(buffer: Buffer) -> Path:
    (file,) = segments(buffer).glob("*.arrows")
    return file


@pytest.mark.parametrize("table", INSERTS)
def test_the_database_refuses_names_that_are_not_plain(buffer: Buffer, table: str) -> None:
    for name in HOSTILE:
        with buffer.database.connection() as connection, pytest.raises(psycopg.errors.CheckViolation):
            connection.execute(INSERTS[table], [name])  # type: ignore[call-overload]


def test_every_column_that_names_a_file_of_the_buffer_is_checked(buffer: Buffer) -> None:
    columns = buffer.sql(
        "SELECT table_name::text AS t, column_name::text AS c FROM information_schema.columns JOIN information_schema.tables"
        " USING (table_schema, table_name) WHERE table_schema = 'rft' AND table_type = 'BASE TABLE'"
        " AND column_name ~ 'uri|path|file$|folder|filename'"
    ).to_pylist()
    assert {(row["t"], row["c"]) for row in columns} - ELSEWHERE == {
        ("segment_file", "uri"),
        ("retired_range", "uri"),
        ("archive_file", "path"),
    }


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", ["../victim.txt", "folder/../../victim.txt", "/etc/hostname", ".."])
def test_the_store_refuses_names_that_are_not_plain(tmp_path: Path, victim: Path, operation: str, name: str) -> None:
    store = PosixSegmentStore(tmp_path / "segments")
    (store.folder / "folder").mkdir()
    with pytest.raises(RftError, match="names a file that cannot be one of the buffer"):
        OPERATIONS[operation](store, name)
    assert victim.read_bytes() == TEXT


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_store_follows_no_link(tmp_path: Path, victim: Path, operation: str) -> None:
    store = PosixSegmentStore(tmp_path / "segments")
    (store.folder / "link.arrows").symlink_to(victim)
    os.mkfifo(store.folder / "pipe.arrows")
    assert list(store.files()) == []
    for name in ("link.arrows", "pipe.arrows"):
        with pytest.raises((RftError, OSError)):
            OPERATIONS[operation](store, name)
    assert victim.read_bytes() == TEXT


@pytest.mark.parametrize("operation", ["cut", "remove", "erase"])
def test_the_store_changes_no_file_of_another_buffer(tmp_path: Path, operation: str) -> None:
    store = PosixSegmentStore(tmp_path, owner="0123456789ab")
    other = tmp_path / "ba9876543210-host-1-x.arrows"
    other.write_bytes(TEXT)
    with pytest.raises(RftError, match="a segment file of another buffer"):
        OPERATIONS[operation](store, other.name)
    assert other.read_bytes() == TEXT


def test_compaction_and_erasing_leave_files_that_a_forged_row_names(stored: Buffer, victim: Path) -> None:
    live, other = only_file(stored), segments(stored) / "ba9876543210-host-1-x.arrows"
    other.write_bytes(TEXT)
    (segments(stored) / "link.arrows").symlink_to(victim)
    retired = "INSERT INTO rft.segment_file (uri, size_bytes, closed_at, retired_at) VALUES (%s, 0, now(), now() - interval '1 day')"
    for name in (other.name, "link.arrows"):
        stored.sql(retired, [name])
    stored.sql("INSERT INTO rft.segment_file (uri, size_bytes, closed_at) VALUES (%s, 0, now())", [other.name + "2"])
    shutil.copy(other, other.with_name(other.name + "2"))
    stored.sql(
        "UPDATE rft.segment_file SET closed_at = now(), retired_at = now() - interval '1 day' WHERE uri = %s",
        [live.name],
    )
    Compactor(stored.database, stored.segments, grace_s=0, alone=True).clear()
    assert [file.read_bytes() for file in (other, other.with_name(other.name + "2"), victim)] == [TEXT] * 3
    assert live.exists()

    # A database whose checks were removed.
    stored.sql("UPDATE rft.segment_file SET retired_at = NULL WHERE uri = %s", [live.name])
    stored.sql("ALTER DOMAIN rft.file_name DROP CONSTRAINT file_name_check")
    stored.sql(retired, ["../victim.txt"])
    Compactor(stored.database, stored.segments, grace_s=0, alone=True).clear()
    assert victim.read_bytes() == TEXT
    stored.sql("DELETE FROM rft.segment_file WHERE uri = '../victim.txt'")
    purge.purge(stored, "task_key = 'a'", reason="asked to", author="ada")
    stored.sql("UPDATE rft.retired_range SET uri = '../victim.txt', retired_at = now() - interval '1 day'")
    with pytest.raises(RftError, match="names a file that cannot be one of the buffer"):
        erasure.erase(stored)
    assert victim.read_bytes() == TEXT


def test_one_range_that_cannot_be_erased_keeps_no_other_from_being_erased(stored: Buffer, victim: Path) -> None:
    purge.purge(stored, "task_key = 'a'", reason="asked to", author="ada")
    (segments(stored) / "link.arrows").symlink_to(victim)
    stored.sql(
        "INSERT INTO rft.retired_range (retired_range_id, purge_id, uri, offset_bytes, length_bytes) VALUES (0, 1, 'link.arrows', 0, 8)"
    )
    stored.sql("UPDATE rft.retired_range SET retired_at = now() - interval '1 day'")
    with pytest.raises(RftError):
        erasure.erase(stored)
    left = stored.sql("SELECT uri FROM rft.retired_range WHERE erased_at IS NULL")
    assert left["uri"].to_pylist() == ["link.arrows"] and victim.read_bytes() == TEXT


def test_a_segment_file_that_is_a_link_is_damaged_and_not_backed_up(stored: Buffer, tmp_path: Path) -> None:
    file = only_file(stored)
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    stored.reader.forget()
    problems = list(verify(stored))
    assert problems and all("its file is a symbolic link, or not a plain file" in problem for problem in problems)
    with pytest.raises(SegmentCorruptError, match="symbolic link"):
        backup.back_up(stored, tmp_path / "backup")
    assert not (tmp_path / "backup").exists()


def test_links_in_a_backup_are_not_restored(stored: Buffer, tmp_path: Path) -> None:
    backup.back_up(stored, tmp_path / "backup")
    (file,) = (tmp_path / "backup" / "segments").iterdir()
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    target = BufferConfig(uri=str(tmp_path / "restored"), segments=str(tmp_path / "arrays"), min_free_bytes=0)
    with pytest.raises(RftError):
        backup.restore(tmp_path / "backup", target)
    assert list((tmp_path / "arrays").iterdir()) == []


@pytest.mark.parametrize("what", ["file", "folder"])
def test_links_in_archives_are_not_followed(stored: Buffer, tmp_path: Path, what: str) -> None:
    archive(stored, "r", author="ada")
    file = next(path for path in stored.archives.all_files() if path.parent.parent.name == "experience")
    linked = file if what == "file" else file.parent
    linked.rename(tmp_path / "elsewhere")
    linked.symlink_to(tmp_path / "elsewhere")
    assert any(str(file) in problem for problem in verify(stored))
    with pytest.raises(RftError, match="the archive file"):
        restore_run(stored, "r")
    with pytest.raises(RftError):
        stored.query("SELECT response FROM experience").read_all()
    with pytest.raises(RftError):
        backup.back_up(stored, tmp_path / "backup")
    stored.archives.remove(1)
    assert (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("name", ["../r", "a/b", "/etc", ".", "..", "", "a\nb", "x" * 300])
def test_a_run_cannot_have_a_name_that_leads_out_of_the_folder_of_runs(buffer: Buffer, name: str) -> None:
    with pytest.raises(RftError, match="name"):
        buffer.create_run(name=name, config={}, seed=1, steps=1, pipeline_version="none")
    run = buffer.create_run(name="r", config={}, seed=1, steps=1, pipeline_version="none")
    with buffer.database.connection() as connection, pytest.raises(psycopg.errors.CheckViolation):
        connection.execute("UPDATE rft.run SET name = %s WHERE run_id = %s", [name, run.run_id])
