"""The Parquet files of archives: their names, and writing and reading of their rows.

One folder per table, one below it per run, named `run=NAME` as Hive does, and numbered files in it. DuckDB, Spark and Hugging Face datasets
read a folder as one table. Names of files begin with the buffer's digits and the run's id, so that buffers may share a folder.

A file is complete when a row of rft.archive_file names it with its checksum. Files without such a row are leftovers.
Links are never followed (`rftdata.files.plain`).
"""

from __future__ import annotations

import contextlib
import errno
import io
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from urllib.parse import quote

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import xxhash

from rftdata.errors import DiskFullError, QueryError, RftError, is_disk_full
from rftdata.files.durable import make_folder, sync_path
from rftdata.files.plain import check_path, create_file, open_file, paths_below, plain_size, unlink_plain

_READ_BYTES = 8 * 2**20
# Fast, and within a few percent of the size at higher levels.
_COMPRESSION_LEVEL = 1


@dataclass(frozen=True)
class ArchiveFile:
    """A complete file of an archive; fields as the columns of rft.archive_file."""

    path: str
    table_name: str
    num_rows: int
    num_bytes: int
    checksum: str


class ArchiveFolder:
    """The folder of a buffer's archives.

    Args:
        folder: the folder, which need not exist.
        owner: first digits of the buffer's id.
    """

    def __init__(self, folder: Path, owner: str) -> None:
        self.folder = folder
        self.owner = owner

    def new_file(self, table: str, run: str, run_id: int, number: int) -> str:
        """Return the path of a run's file below the folder, and create the file's folder."""
        path = f"{table}/run={quote(run, safe='')}/{self._prefix(run_id)}{number:05}.parquet"
        with self.disk_errors():
            make_folder((self.folder / path).parent)
        return path

    def create_file(self, path: str) -> IO[bytes]:
        """Create a file below the folder, of a path from `new_file`."""
        return create_file(self.folder, path)

    def files_of(self, run_id: int) -> list[Path]:
        """Return all files of a run, complete or not."""
        return [file for file in self.all_files() if file.name.startswith(self._prefix(run_id))]

    def all_files(self) -> list[Path]:
        """Return all files of this buffer, complete or not."""
        paths = [self.folder / path for path in paths_below(self.folder, 2)]
        ours = re.compile(re.escape(self.owner) + r"-\d+-.*\.parquet")
        return [path for path in paths if ours.fullmatch(path.name) and path.parent.name.startswith("run=")]

    def run_id_of(self, file: Path) -> int:
        """Return the id of the run of a file of this buffer."""
        return int(file.name.removeprefix(f"{self.owner}-").partition("-")[0])

    def remove(self, run_id: int) -> None:
        """Remove all files of a run, durably, and folders that are empty then."""
        with self.disk_errors():
            for file in self.files_of(run_id):
                with contextlib.suppress(FileNotFoundError):
                    unlink_plain(self.folder, file.relative_to(self.folder).as_posix())
                if not any(file.parent.iterdir()):
                    file.parent.rmdir()
                    sync_path(file.parent.parent)
                else:
                    sync_path(file.parent)

    def completed(self, path: str, table: str, num_rows: int) -> ArchiveFile:
        """Make a written file durable, and return it with its size and checksum."""
        file = self.folder / path
        with self.disk_errors():
            sync_path(file)
            sync_path(file.parent)
            return ArchiveFile(path, table, num_rows, plain_size(self.folder, path), self._checksum(path))

    def problem(self, path: str, num_bytes: int, checksum: str) -> str | None:
        """Compare a file with its size and checksum; return what is wrong with it, None if nothing is."""
        file = self.folder / path
        try:
            size = plain_size(self.folder, path)
            if size != num_bytes:
                return f"the archive file {file} has {size} bytes instead of {num_bytes}"
            if self._checksum(path) != checksum:
                return f"the archive file {file} does not match its checksum"
        except FileNotFoundError:
            return f"the archive file {file} is missing"
        except OSError as error:
            if error.errno == errno.ELOOP:
                return f"the archive file {file} is a symbolic link"
            return f"the archive file {file} cannot be read: {error.strerror}"
        return None

    def check(self, files: Sequence[Mapping[str, object]]) -> None:
        """Compare files with their sizes and checksums.

        Raises:
            RftError: one is missing or damaged.
        """
        for row in files:
            if problem := self.problem(str(row["path"]), int(str(row["num_bytes"])), str(row["checksum"])):
                raise RftError(problem, todo="restore the file from a backup; `rft doctor` lists all such files")

    @contextlib.contextmanager
    def open(self, path: str) -> Iterator[pq.ParquetFile]:
        """Open a file for reading while the block runs.

        Raises:
            RftError: it is missing, or not a Parquet file.
        """
        with contextlib.ExitStack() as opened:
            yield self._opened(opened, path)

    def _opened(self, opened: contextlib.ExitStack, path: str) -> pq.ParquetFile:
        try:
            return pq.ParquetFile(opened.enter_context(self.open_file(path)), page_checksum_verification=True)
        except FileNotFoundError as error:
            raise RftError(
                f"the archive file {self.folder / path} is missing",
                todo="if the run was restored meanwhile, run it again; else restore the file from a backup",
            ) from error
        except (OSError, pa.ArrowException) as error:
            raise RftError(
                f"the archive file {self.folder / path} cannot be read: {error}", todo="restore it from a backup"
            ) from error

    def open_file(self, path: str) -> IO[bytes]:
        """Open a plain file for reading; raises as `rftdata.files.plain.open_plain` does."""
        return open_file(self.folder, path)

    def copy(self, path: str, source: ArchiveFolder) -> None:
        """Copy a file of another folder to the same path, durably.

        Raises:
            RftError: the path leads out of the folder.
            OSError: the file is missing, or the copy cannot be written.
        """
        check_path(path)
        make_folder((self.folder / path).parent)
        with source.open_file(path) as read, create_file(self.folder, path) as written:
            shutil.copyfileobj(read, written, _READ_BYTES)
        sync_path(self.folder / path)
        sync_path((self.folder / path).parent)

    def same(self, path: str, other: ArchiveFolder) -> bool:
        """Return whether the file of a path has the content that it has in another folder, where it exists."""
        return self.problem(path, plain_size(other.folder, path), other._checksum(path)) is None

    def _checksum(self, path: str) -> str:
        """Return the xxh3-64 of a file's bytes, hexadecimal."""
        digest = xxhash.xxh3_64()
        with self.open_file(path) as opened:
            while data := opened.read(_READ_BYTES):
                digest.update(data)
        return digest.hexdigest()

    def disk_errors(self) -> _DiskErrors:
        """Return a context that converts errors of the disk to errors that name the folder."""
        return _DiskErrors(self.folder)

    def _prefix(self, run_id: int) -> str:
        return f"{self.owner}-{run_id}-"


class _DiskErrors:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> None:
        return None

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        if not isinstance(error, OSError):
            return
        if is_disk_full(error):
            raise DiskFullError(
                f"the disk of the archives in {self._folder} is full", todo="free some space; no row was moved"
            ) from error
        raise QueryError(
            f"the folder of the archives cannot be written: {error.strerror or error}",
            value=str(self._folder),
            todo="correct its permissions, or free the name",
        ) from error


class ParquetPart:
    """A Parquet file that is being written, in row groups of the tables given to it."""

    def __init__(self, file: IO[bytes], schema: pa.Schema) -> None:
        self._file = file
        # Dictionaries pay for texts that repeat. Arrays have too many different values.
        plain = [field.name for field in schema if not pa.types.is_nested(field.type)]
        self._writer = pq.ParquetWriter(
            file,
            schema,
            compression="zstd",
            compression_level=_COMPRESSION_LEVEL,
            use_dictionary=plain,
            write_page_checksum=True,
        )
        self.num_rows = 0

    def write(self, table: pa.Table) -> None:
        self._writer.write_table(table, row_group_size=max(1, table.num_rows))
        self.num_rows += table.num_rows

    def close(self) -> None:
        self._writer.close()
        self._file.close()


def row_groups(file: pq.ParquetFile, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """Yield a file's row groups, one in memory at a time."""
    for i in range(file.num_row_groups):
        yield file.read_row_group(i, columns=None if columns is None else list(columns), use_threads=False)


def as_csv(table: pa.Table) -> bytes:
    """Return rows in the CSV that PostgreSQL's COPY reads: NULL is empty without quotes, bytes are hexadecimal."""
    for i, field in enumerate(table.schema):
        if pa.types.is_binary(field.type):
            texts = [None if value is None else f"\\x{value.hex()}" for value in table.column(i).to_pylist()]
            table = table.set_column(i, field.name, pa.array(texts, pa.string()))
    sink = io.BytesIO()
    pacsv.write_csv(table, sink, pacsv.WriteOptions(include_header=False))
    return sink.getvalue()
