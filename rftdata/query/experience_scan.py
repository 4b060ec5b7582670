"""One pass over experiences with their arrays, for data loaders: rows from PostgreSQL by COPY, arrays from the mapped segments, texts and
arrays of archived runs from their files.

Rows come in the order of `experience_id`, in which they were stored, so that segments are read from their beginning to their end. A
share of a pass consists of blocks of adjacent ids: every row is in exactly one share, whatever is stored meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import psycopg
import pyarrow as pa
from psycopg import sql

from rftdata.archives.files import ArchiveFolder
from rftdata.config_errors import did_you_mean
from rftdata.errors import ArchivedError, ConfigError, QueryError
from rftdata.postgres.arrow_copy import arrow_type, copy_batches
from rftdata.postgres.database import Connection, Database, fetch
from rftdata.postgres.written_text import check_condition, condition_error, in_parentheses
from rftdata.query.archived import ARCHIVED_TEXTS, ArchivedColumns, ArchivedRows, ascending
from rftdata.query.arrays import BASE_ARRAYS, OPTIONAL_ARRAYS, PLACE, ArrayColumns, OnDamage, parts
from rftdata.query.catalogue import tables
from rftdata.segments.base import SegmentStore
from rftdata.segments.reader import SegmentReader

_OPEN_SEGMENTS = 64
_BLOCK_IDS = 64
_ORDER = sql.SQL("experience_id")


def scan_experiences(
    database: Database,
    store: SegmentStore,
    archives: ArchiveFolder,
    columns: Sequence[str],
    where: str | None,
    *,
    run_id: int | None = None,
    share: tuple[int, int] = (0, 1),
    on_damage: OnDamage | None = None,
) -> pa.RecordBatchReader:
    """Return rows of `rft.v_experience` with arrays; arguments and errors as in `Buffer.scan`."""
    index, count = share
    if not 0 <= index < count:
        raise ConfigError(
            "a share is its index and the number of all shares", value=share, allowed="(0, 1), (0, 2), (1, 2), …"
        )
    table_columns = tables(database)
    kinds = table_columns["v_experience"]
    arrays = BASE_ARRAYS | OPTIONAL_ARRAYS
    for name in columns:
        if name not in kinds and name not in arrays:
            raise QueryError(
                "unknown column",
                value=name,
                allowed="the columns of rft.v_experience, " + ", ".join(arrays),
                todo=did_you_mean(name, [*kinds, *arrays], "`rft sql '\\d rft.v_experience'` lists the columns"),
            )
    schema = pa.schema([(name, arrays[name] if name in arrays else arrow_type(kinds[name])) for name in columns])
    scan = _Scan(
        schema=schema,
        view_columns=kinds,
        table_columns={name: kind for name, kind in table_columns["experience"].items() if kinds.get(name) == kind},
        run_id=run_id,
        where=where,
        condition=_condition(where, run_id, share),
    )
    reader = ArrayColumns(SegmentReader(database, store, max_segments=_OPEN_SEGMENTS), on_damage)
    batches = _batches(database, reader, archives, scan)
    next(batches)  # so that a condition that is refused raises at the call
    return pa.RecordBatchReader.from_batches(schema, batches)


@dataclass(frozen=True, kw_only=True)
class _Scan:
    """What one pass reads.

    Attributes:
        schema: columns and arrays of its batches.
        view_columns: names and types of the columns of rft.v_experience.
        table_columns: those that rft.experience has as well.
        run_id: the only run that is read; None for all.
        where: the user's condition.
        condition: the whole condition, of the user, the run and the share.
    """

    schema: pa.Schema
    view_columns: Mapping[str, str]
    table_columns: Mapping[str, str]
    run_id: int | None
    where: str | None
    condition: sql.Composable | None

    @property
    def arrays(self) -> list[str]:
        """The names of the arrays that it reads."""
        return [name for name in self.schema.names if name not in self.view_columns]

    def row_columns(self, *, with_archived: bool) -> dict[str, str]:
        """Return names and types of the columns that the database must return."""
        names = {*(name for name in self.schema.names if name in self.view_columns), *(PLACE if self.arrays else ())}
        names |= {*PLACE, "experience_id", "run_id"} if with_archived else set()
        return {name: kind for name, kind in self.view_columns.items() if name in (names or {"experience_id"})}


def _condition(where: str | None, run_id: int | None, share: tuple[int, int]) -> sql.Composable | None:
    index, count = share
    conditions = [in_parentheses(where)] if where is not None else []
    if run_id is not None:
        conditions.append(sql.SQL("run_id = {}").format(sql.Literal(run_id)))
    if count > 1:
        conditions.append(sql.SQL("experience_id / {} % {} = {}").format(*map(sql.Literal, (_BLOCK_IDS, count, index))))
    return sql.SQL(" AND ").join(conditions) if conditions else None


def _batches(
    database: Database, arrays: ArrayColumns, archives: ArchiveFolder, scan: _Scan
) -> Iterator[pa.RecordBatch | None]:
    """Yield None once the condition was accepted, and then the rows."""
    where, names = scan.where, scan.schema.names
    with ExitStack() as resources:
        connection = resources.enter_context(database.reading())
        if where is not None:
            check_condition(connection, where)
        runs = fetch(connection, "archived_among", run_ids=None if scan.run_id is None else [scan.run_id])
        files = fetch(connection, "archive_files", run_id=scan.run_id) if runs else []
        archived = ArchivedRows(archives, files).experiences(scan.schema, scan.run_id)
        rows = scan.row_columns(with_archived=archived is not None)
        source = _source(connection, scan, rows)
        view = sql.Identifier("rft", "v_experience")
        if runs and not _accepts(connection, _columns_of(view, scan.view_columns.keys() - ARCHIVED_TEXTS), scan):
            raise ArchivedError(
                f"the run {runs[0]['run']!r} is archived, and the condition reads one of its texts",
                value=where,
                allowed=f"conditions without {', '.join(sorted(ARCHIVED_TEXTS))}",
                todo=f"name another run (run=), use `Buffer.query`, or bring it back first: `rft restore-run {runs[0]['run']}`",
            )
        yield None
        try:
            for batch in copy_batches(connection, source, rows, scan.condition, order=_ORDER):
                for part in _filled(batch, arrays, scan.arrays, archived, names):
                    yield part.select(names)
        except psycopg.OperationalError:
            raise
        except psycopg.DatabaseError as error:  # of some row, such as a division by zero
            raise condition_error(error, where) from error


def _source(connection: Connection, scan: _Scan, rows: Mapping[str, str]) -> sql.Composable:
    """Return the table that a pass reads: the view joins many tables, so it is read only where its own columns are needed."""
    table = _columns_of(sql.Identifier("rft", "experience"), scan.table_columns)
    if set(rows) <= set(scan.table_columns) and _accepts(connection, table, scan):
        return table
    view = sql.Identifier("rft", "v_experience")
    _accepts(connection, view, scan)
    return view


def _filled(
    batch: pa.RecordBatch,
    arrays: ArrayColumns,
    wanted: Sequence[str],
    archived: ArchivedColumns | None,
    columns: Sequence[str],
) -> Iterator[pa.RecordBatch]:
    """Yield the rows with their arrays, and those of archived runs with what archiving took away.

    Args:
        wanted: names of the arrays.
        columns: what the batches have at least, arrays included.
    """
    if archived is None:
        yield from arrays.add(batch, wanted) if wanted else [batch]
        return
    names = list(dict.fromkeys(["experience_id", *columns]))
    for part in parts(batch):
        taken = np.isin(part["run_id"].to_numpy(), archived.run_ids)
        live = part.filter(pa.array(~taken))
        pieces = [piece.select(names) for piece in (arrays.add(live, wanted) if wanted else [live])]
        if taken.any():
            rest = part.filter(pa.array(taken))
            from_files = archived.look_up(rest["experience_id"].to_numpy())
            both = [(from_files if name in from_files.schema.names else rest)[name] for name in names]
            pieces = [*(piece for piece in pieces if piece.num_rows), pa.RecordBatch.from_arrays(both, names)]
        yield ascending(pieces)


def _columns_of(table: sql.Identifier, names: Iterable[str]) -> sql.Composable:
    """Return some columns of a table in place of rft.v_experience."""
    return sql.SQL("(SELECT {} FROM {}) AS v_experience").format(sql.SQL(", ").join(map(sql.Identifier, names)), table)


def _accepts(connection: Connection, source: sql.Composable, scan: _Scan) -> bool:
    """Return whether a table or view has the columns that a condition names.

    Raises:
        QueryError: the condition is invalid for another reason, or the view lacks a column.
    """
    query = sql.SQL("SELECT FROM {} WHERE {} LIMIT 0").format(source, scan.condition or sql.SQL("true"))
    try:
        with connection.transaction():
            # Binary, which allows only one statement, whatever the condition contains.
            connection.cursor(binary=True).execute(query.as_bytes(connection))
    except psycopg.OperationalError:
        raise
    except psycopg.DatabaseError as error:
        if isinstance(error, psycopg.errors.UndefinedColumn) and not isinstance(source, sql.Identifier):
            return False
        raise condition_error(error, scan.where) from error
    return True
