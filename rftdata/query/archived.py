"""The part of a table that lies in archives, as a query or a scan reads it: the same columns and types as in the database.

Columns that archiving leaves in the database are read there. Files are read only by scans that need what archiving takes away.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from psycopg import sql

from rftdata.archives.files import ArchiveFolder
from rftdata.errors import QueryError, RftError
from rftdata.postgres.database import Row
from rftdata.query.arrays import BASE_ARRAYS, OPTIONAL_ARRAYS, typed
from rftdata.query.conditions import columns_of, parse

_ARRAYS = BASE_ARRAYS.keys() | OPTIONAL_ARRAYS.keys()
# What archiving takes away: columns; None for whole rows.
ARCHIVED_TEXTS = frozenset({"prompt", "response", "response_hash", "messages", "reward_parts", "metrics"})
_TAKEN: Mapping[str, frozenset[str] | None] = {
    "experience": ARCHIVED_TEXTS | _ARRAYS,
    "v_experience": ARCHIVED_TEXTS,
    "group_prompt": frozenset({"prompt", "messages"}),
    "group_baseline": frozenset({"response", "messages", "reward_parts"}),
    "score": None,
}
_ROWS_AT_ONCE = 4096
# Row groups that `ArchivedColumns` keeps in memory for rows to come, in bytes.
_HELD_BYTES = 128 * 2**20
_CHECKED = ds.ParquetFileFormat(
    default_fragment_scan_options=ds.ParquetFragmentScanOptions(page_checksum_verification=True)
)


class ArchivedRows:
    """The files of all archived runs, as of the snapshot of a query.

    Args:
        files: rows of rft.archive_file.
    """

    def __init__(self, folder: ArchiveFolder, files: Sequence[Row]) -> None:
        self._folder = folder
        self._files = files

    def files(self, table: str, needed: Collection[str], run_id: int | None) -> list[Row]:
        """Return the files that a scan must read: those of one run, or of all; none if the database has all that it needs."""
        if table not in _TAKEN:
            return []
        taken = _TAKEN[table]
        if taken is not None and taken.isdisjoint(needed):
            return []
        name = "experience" if table == "v_experience" else table
        return [row for row in self._files if row["table_name"] == name and run_id in (None, row["run_id"])]

    def experiences(self, schema: pa.Schema, run_id: int | None) -> ArchivedColumns | None:
        """Return the columns of a schema of experiences that archiving took away: those of one run, or of all; None if there are none."""
        files = self.files("experience", schema.names, run_id)
        taken = _TAKEN["experience"] or frozenset()
        fields = [field for field in schema if field.name in taken]
        return ArchivedColumns(self._folder, files, fields) if files else None

    def others(self, table: str, files: Sequence[Row]) -> sql.Composable | None:
        """Return the condition for the rows that are not in these files."""
        runs = sql.SQL(", ").join(sql.Literal(run_id) for run_id in sorted({row["run_id"] for row in files}))
        if not files or _TAKEN[table] is None:
            return None
        if table in ("experience", "v_experience"):
            return sql.SQL("run_id NOT IN ({})").format(runs)
        return sql.SQL("group_id NOT IN (SELECT group_id FROM rft.rollout_group WHERE run_id IN ({}))").format(runs)

    def size(self, files: Sequence[Row], needed: Collection[str]) -> tuple[int, int]:
        """Return the number of rows, and the bytes of the needed columns, that the files hold."""
        num_rows = num_bytes = 0
        for row in files:
            with self._folder.open(row["path"]) as opened:
                num_rows += opened.metadata.num_rows
                groups = (opened.metadata.row_group(i) for i in range(opened.num_row_groups))
                columns = (group.column(i) for group in groups for i in range(group.num_columns))
                num_bytes += sum(c.total_uncompressed_size for c in columns if c.path_in_schema.split(".")[0] in needed)
        return num_rows, num_bytes

    def read(self, files: Sequence[Row], schema: pa.Schema, filter: pc.Expression | None) -> Iterator[pa.RecordBatch]:
        """Yield the rows that pass a filter, with the columns of a schema and those of the filter.

        Args:
            schema: columns that the filter or the caller needs.
        """
        for row in files:
            with self._folder.open(row["path"]):
                pass  # a missing or damaged file is an error that names it
            with self._folder.open_file(row["path"]) as file:
                yield from self._read(file, str(self._folder.folder / row["path"]), schema, filter)

    def _read(
        self, file: IO[bytes], path: str, schema: pa.Schema, filter: pc.Expression | None
    ) -> Iterator[pa.RecordBatch]:
        fragment = _CHECKED.make_fragment(file)
        stored = fragment.physical_schema
        node = None if filter is None else parse(filter)
        early = node is not None and (columns_of(node) - _ARRAYS) == columns_of(node) <= set(stored.names)
        scanner = fragment.scanner(
            columns=_stored_columns(schema, stored),
            filter=filter if early else None,
            batch_size=_ROWS_AT_ONCE,
            batch_readahead=1,
            fragment_readahead=1,
            use_threads=False,
        )
        for batch in _whole(scanner.to_batches(), path):
            rows = _as_queried(batch, schema, stored)
            yield rows if early or filter is None else rows.filter(filter)


@dataclass(frozen=True)
class _Loaded:
    """The rows of a row group; ids: theirs in ascending order; places: the rows that have them."""

    rows: pa.RecordBatch
    ids: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]


class ArchivedColumns:
    """Looks up what archiving took away from experiences, for requests in ascending order of `experience_id`.

    Files are in the order of segments, in which experiences were stored, so few row groups have ids on both sides of any id. A row
    group is kept in memory until its last id has passed, or until others need the memory, and is read again if it is needed after that.

    Args:
        files: rows of rft.archive_file, of the table experience.
        fields: the columns and arrays to look up.

    Attributes:
        run_ids: the runs whose experiences the files hold.
    """

    def __init__(self, folder: ArchiveFolder, files: Sequence[Row], fields: Sequence[pa.Field]) -> None:
        self._folder = folder
        self._schema = pa.schema([("experience_id", pa.int64()), *fields])
        self.run_ids = sorted({row["run_id"] for row in files})
        self._row_groups: list[tuple[str, int]] = []
        bounds: list[tuple[int, int]] = []
        for row in files:
            with folder.open(row["path"]) as opened:
                column = opened.schema_arrow.names.index("experience_id")
                for i in range(opened.num_row_groups):
                    ids = opened.metadata.row_group(i).column(column).statistics
                    self._row_groups.append((row["path"], i))
                    bounds.append((ids.min, ids.max))
        self._bounds = np.array(bounds, np.int64).reshape(-1, 2)
        self._loaded: dict[int, _Loaded] = {}

    def look_up(self, experience_ids: npt.NDArray[np.int64]) -> pa.RecordBatch:
        """Return experience_id and the columns and arrays of experiences.

        Args:
            experience_ids: ascending, and none below those of an earlier call; at least one.

        Raises:
            RftError: a file is missing or damaged.
        """
        self._loaded = {i: rows for i, rows in self._loaded.items() if rows.ids[-1] >= experience_ids[0]}
        first = np.searchsorted(experience_ids, self._bounds[:, 0])
        end = np.searchsorted(experience_ids, self._bounds[:, 1], side="right")
        pieces = []
        for i in np.flatnonzero(first < end).tolist():
            loaded = self._row_group(i)
            wanted = np.isin(loaded.ids, experience_ids[first[i] : end[i]])
            pieces.append(loaded.rows.take(pa.array(loaded.places[wanted])))
        if sum(piece.num_rows for piece in pieces) != len(experience_ids):
            raise RftError(
                f"the files of archived runs lack experiences between {experience_ids[0]} and {experience_ids[-1]}",
                todo="run `rft doctor`, and bring the files back from a backup",
            )
        return ascending(pieces)

    def _row_group(self, i: int) -> _Loaded:
        if i in self._loaded:
            self._loaded[i] = self._loaded.pop(i)  # now the last to be removed
            return self._loaded[i]
        path, index = self._row_groups[i]
        with self._folder.open(path) as opened:
            stored = opened.schema_arrow
            batches = opened.iter_batches(
                _ROWS_AT_ONCE, [index], _stored_columns(self._schema, stored), use_threads=False
            )
            whole = _whole(batches, str(self._folder.folder / path))
            rows = pa.concat_batches([_as_queried(batch, self._schema, stored) for batch in whole])
        ids = rows["experience_id"].to_numpy()
        places = np.argsort(ids)
        while self._loaded and sum(each.rows.nbytes for each in self._loaded.values()) + rows.nbytes > _HELD_BYTES:
            del self._loaded[next(iter(self._loaded))]
        self._loaded[i] = _Loaded(rows, ids[places], places)
        return self._loaded[i]


def ascending(pieces: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Return the rows of batches with the same columns, one of which is experience_id, in its order.

    Args:
        pieces: at least one, each in this order.
    """
    if len(pieces) == 1:
        return pieces[0]
    together = pa.concat_batches(pieces)
    return together.take(pa.array(np.argsort(together["experience_id"].to_numpy())))


def _stored_columns(schema: pa.Schema, stored: pa.Schema) -> list[str]:
    """Return the columns of a file that have those of a schema."""
    names = [name for name in schema.names if name in stored.names]
    return [*names, "purged"] if "purged" in stored.names and not _ARRAYS.isdisjoint(names) else names


def _as_queried(batch: pa.RecordBatch, schema: pa.Schema, stored: pa.Schema) -> pa.RecordBatch:
    """Return rows of a file with the columns and types of a query.

    Args:
        stored: schema of the file.
    """
    columns = [_column(batch, field, stored, field.name in _ARRAYS) for field in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _whole(batches: Iterator[pa.RecordBatch], path: str) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a file.

    Raises:
        QueryError: it is damaged.
    """
    try:
        yield from batches
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise QueryError(
            f"a file of an archived run is damaged: {error}",
            value=path,
            todo="run `rft doctor`, and bring the file back from a backup",
        ) from error


def _column(batch: pa.RecordBatch, field: pa.Field, stored: pa.Schema, is_array: bool) -> pa.Array:
    if field.name not in batch.schema.names:
        return pa.nulls(batch.num_rows, field.type)
    column = batch.column(field.name)
    if not is_array:
        return column if column.type == field.type else column.cast(field.type)
    column = typed(column, stored.field(field.name), field.type)
    return pc.if_else(batch.column("purged"), pa.scalar(None, field.type), column)
