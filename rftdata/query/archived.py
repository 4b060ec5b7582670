"""The part of a table that lies in archives, as a query reads it: the same columns and types as in the database.

Columns that archiving leaves in the database are read there. Files are read only by scans that need what archiving takes away.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from psycopg import sql

from rftdata.archives.files import ArchiveFolder
from rftdata.errors import QueryError
from rftdata.postgres.database import Row
from rftdata.query.arrays import BASE_ARRAYS, OPTIONAL_ARRAYS, typed
from rftdata.query.conditions import columns_of, parse

# What archiving takes away: columns; None for whole rows.
_TEXTS = frozenset({"prompt", "response", "response_hash", "messages", "reward_parts", "metrics"})
_TAKEN: Mapping[str, frozenset[str] | None] = {
    "experience": _TEXTS | BASE_ARRAYS.keys() | OPTIONAL_ARRAYS.keys(), "v_experience": _TEXTS,
    "group_prompt": frozenset({"prompt", "messages"}), "group_baseline": frozenset({"response", "messages", "reward_parts"}), "score": None,
}  # fmt: skip
_ROWS_AT_ONCE = 4096
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
            self._folder.open(row["path"]).close()  # a missing or damaged file is an error that names it
            yield from self._read(str(self._folder.folder / row["path"]), schema, filter)

    def _read(self, path: str, schema: pa.Schema, filter: pc.Expression | None) -> Iterator[pa.RecordBatch]:
        stored = ds.dataset(path, format=_CHECKED)
        node = None if filter is None else parse(filter)
        arrays = BASE_ARRAYS.keys() | OPTIONAL_ARRAYS.keys()
        early = node is not None and (columns_of(node) - arrays) == columns_of(node) <= set(stored.schema.names)
        names = [name for name in schema.names if name in stored.schema.names]
        if "purged" in stored.schema.names and not arrays.isdisjoint(names):
            names.append("purged")
        scanner = stored.scanner(
            columns=names, filter=filter if early else None, batch_size=_ROWS_AT_ONCE, batch_readahead=1, fragment_readahead=1,
            use_threads=False,
        )  # fmt: skip
        for batch in _whole(scanner.to_batches(), path):
            found = pa.RecordBatch.from_arrays(
                [_column(batch, field, stored.schema, field.name in arrays) for field in schema], schema=schema
            )
            yield found if early or filter is None else found.filter(filter)


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
