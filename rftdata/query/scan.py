"""Tables as DuckDB scans them: each scan asks PostgreSQL and the segments for its columns and its filter only.

DuckDB pushes projections and filters into a registered `pyarrow.dataset.Dataset` and calls `scanner` when the scan begins, so a table
that a query names twice is read twice, each time by what that part of the query needs. All scans of a query see one snapshot.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from psycopg import sql

from rftdata.archives.files import ArchiveFolder
from rftdata.errors import QueryError
from rftdata.postgres.arrow_copy import arrow_type, copy_batches
from rftdata.postgres.database import Connection, Database, Row, fetch, one, send
from rftdata.query.archived import ArchivedRows
from rftdata.query.arrays import BASE_ARRAYS, OPTIONAL_ARRAYS, PLACE, ArrayColumns
from rftdata.query.conditions import columns_of, condition, parse

Columns = Mapping[str, str]


class Reading:
    """State that the scans of one query share: the snapshot, the arrays, the archives, the limit of bytes, and the error that ended a scan.

    Args:
        archives: folder of the archived runs.
        limit_bytes: scans that would exceed it together, by estimate, are refused before they begin; None for no limit.
    """

    def __init__(
        self, database: Database, arrays: ArrayColumns, archives: ArchiveFolder, limit_bytes: int | None
    ) -> None:
        self.arrays = arrays
        self._archives = archives
        self._archived: ArchivedRows | None = None
        self.error: Exception | None = None
        self._database = database
        self._limit_bytes = limit_bytes
        self._bytes = 0
        self._resources = ExitStack()
        self._first: Connection | None = None
        self._snapshot = ""

    def close(self) -> None:
        self._resources.close()

    def _snapshot_holder(self) -> Connection:
        """Return the connection whose transaction holds the snapshot of all scans."""
        if self._first is None:
            self._first = self._resources.enter_context(self._database.reading())
            self._snapshot = one(send(self._first, "share_snapshot"))["snapshot"]
        return self._first

    def archived(self) -> ArchivedRows:
        """Return the archived runs in the query's snapshot."""
        if self._archived is None:
            files = fetch(self._snapshot_holder(), "archive_files", run_id=None)
            self._archived = ArchivedRows(self._archives, files)
        return self._archived

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        """Yield a separate connection in a transaction that sees the query's snapshot."""
        self._snapshot_holder()
        with self._database.reading() as connection:
            connection.execute(sql.SQL("SET TRANSACTION SNAPSHOT {}").format(sql.Literal(self._snapshot)))
            yield connection

    def admit(self, name: str, query: sql.Composable, *, with_arrays: bool) -> None:
        """Count the bytes that a scan will read, by the server's statistics and the sizes of the segments.

        Raises:
            QueryError: the query would read more than its limit.
        """
        if self._limit_bytes is None:
            return
        connection = self._snapshot_holder()
        plan = connection.execute(sql.SQL("EXPLAIN (FORMAT JSON) {}").format(query)).fetchone()
        assert plan is not None
        root = plan["QUERY PLAN"][0]["Plan"]
        num_rows = root["Plan Rows"]
        self._bytes += num_rows * root["Plan Width"]
        if with_arrays:
            [stored] = fetch(connection, "array_sizes")
            self._bytes += int(stored["size_bytes"] * min(1.0, num_rows / max(1, stored["num_rows"])))
        self._check_limit(name, num_rows)

    def admit_files(self, name: str, files: Sequence[Row], columns: Sequence[str]) -> None:
        """Count the bytes of archive files that a scan will read; raises as `admit` does."""
        if self._limit_bytes is not None and files:
            num_rows, num_bytes = self.archived().size(files, columns)
            self._bytes += num_bytes
            self._check_limit(name, num_rows)

    def _check_limit(self, name: str, num_rows: int) -> None:
        if self._limit_bytes is not None and self._bytes > self._limit_bytes:
            raise QueryError(
                f"the query would read about {self._bytes:,} bytes, the last of them from {name} ({num_rows:,} rows)",
                allowed=f"at most {self._limit_bytes:,} (--limit-bytes)",
                todo="name fewer columns, add a condition or a run, or raise the limit",
            )


class Table(ds.Dataset):  # type: ignore[misc]  # pyarrow has no types
    """A table or view of schema rft.

    Args:
        columns: names and types of its columns, as in `rftdata.query.catalogue`.
        arrays: names of the array columns that it has besides.
        run_id: the only run that it has rows of; None for all.
        direct: a table with the same rows and, by name, some of the same columns, for scans that need no other; None if there is none.
    """

    def __init__(
        self,
        name: str,
        columns: Columns,
        reading: Reading,
        *,
        arrays: Sequence[str] = (),
        run_id: int | None = None,
        direct: tuple[str, Columns] | None = None,
    ) -> None:
        # `Dataset` has no constructor for subclasses in Python. DuckDB uses only `schema` and `scanner`.
        self.name, self._columns, self._arrays = name, columns, list(arrays)
        self._reading, self._run_id, self._direct = reading, run_id, direct
        fields = [pa.field(column, arrow_type(kind)) for column, kind in columns.items()]
        self._schema = pa.schema([*fields, *((a, BASE_ARRAYS.get(a) or OPTIONAL_ARRAYS[a]) for a in arrays)])

    @property
    def schema(self) -> pa.Schema:
        return self._schema

    def scanner(self, columns: list[str] | None = None, filter: pc.Expression | None = None, **_: Any) -> _Scan:
        """Return the rows that pass a filter, as an object with `to_reader`; called by DuckDB."""
        try:
            names = list(columns) if columns is not None else self._schema.names
            return _Scan(pa.schema([self._schema.field(name) for name in names]), self._batches(names, filter))
        except Exception as error:
            self._reading.error = self._reading.error or error
            raise

    def _batches(self, names: list[str], filter: pc.Expression | None) -> Iterator[pa.RecordBatch]:
        node = None if filter is None else parse(filter)
        # A filter that cannot be read may need every column.
        needed = set(names) if filter is None else {*names, *(columns_of(node) if node else self._schema.names)}
        arrays = [name for name in self._arrays if name in needed]
        rows = {name: kind for name, kind in self._columns.items() if name in needed or (arrays and name in PLACE)}
        rows = rows or dict([next(iter(self._columns.items()))])
        files = self._reading.archived().files(self.name, needed, self._run_id)
        of_run = None if self._run_id is None else sql.SQL("run_id = {}").format(sql.Literal(self._run_id))
        conditions = [
            of_run,
            self._reading.archived().others(self.name, files),
            None if node is None else condition(node, self._columns),
        ]
        where = sql.SQL(" AND ").join([c for c in conditions if c is not None]) if any(conditions) else None
        used = set(rows) | ({"run_id"} if of_run is not None else set()) | (needed & set(self._columns))
        table = self.name
        if self._direct is not None:
            table = self._direct[0] if used <= set(self._direct[1]) else f"v_{self.name}"
        source = sql.Identifier("rft", table)
        self._reading.admit(self.name, _select(source, rows, where), with_arrays=bool(arrays))
        self._reading.admit_files(self.name, files, sorted(needed))
        return chain(
            self._read(source, rows, where, arrays, names, filter),
            self._read_files(files, sorted(needed), names, filter),
        )

    def _read(
        self,
        source: sql.Composable,
        rows: Columns,
        where: sql.Composable | None,
        arrays: list[str],
        names: list[str],
        filter: pc.Expression | None,
    ) -> Iterator[pa.RecordBatch]:
        late = filter is not None and bool(arrays) and self._reads_arrays(filter)
        try:
            with self._reading.connection() as connection:
                for batch in copy_batches(connection, source, rows, where):
                    passing = batch if filter is None or late else batch.filter(filter)
                    for part in self._reading.arrays.add(passing, arrays) if arrays else [passing]:
                        kept = part.filter(filter) if late else part
                        if kept.num_rows:
                            yield kept.select(names)
        except Exception as error:
            self._reading.error = self._reading.error or error
            raise

    def _read_files(
        self, files: Sequence[Row], needed: list[str], names: list[str], filter: pc.Expression | None
    ) -> Iterator[pa.RecordBatch]:
        schema = pa.schema([self._schema.field(name) for name in needed])
        try:
            for batch in self._reading.archived().read(files, schema, filter):
                if batch.num_rows:
                    yield batch.select(names)
        except Exception as error:
            self._reading.error = self._reading.error or error
            raise

    def _reads_arrays(self, filter: pc.Expression) -> bool:
        node = parse(filter)
        return node is None or not columns_of(node) <= set(self._columns)


def _select(source: sql.Composable, columns: Columns, where: sql.Composable | None) -> sql.Composable:
    names = sql.SQL(", ").join(map(sql.Identifier, columns))
    query = sql.SQL("SELECT {} FROM {}").format(names, source)
    return query if where is None else sql.SQL("{} WHERE {}").format(query, where)


class _Scan:
    """What DuckDB needs of a `pyarrow.dataset.Scanner`."""

    def __init__(self, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> None:
        self.projected_schema = schema
        self._batches = batches

    def to_reader(self) -> pa.RecordBatchReader:
        return pa.RecordBatchReader.from_batches(self.projected_schema, self._batches)
