"""The three file formats, with one function that writes rows and one that reads them.

A file is written under another name and renamed when it is complete, so a partial file is never visible. An existing file is never
replaced. Reading and writing stream, so a file may be larger than memory.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from rftdata.durable_files import sync_path
from rftdata.errors import QueryError
from rftdata.exchange.ahead import one_ahead
from rftdata.exchange.arrow_rows import rows_of
from rftdata.exchange.columns import REQUIRED, SCHEMA, Row, from_json, to_json

Write = Callable[[list[Row]], None]
FORMATS = {
    ".parquet": "Parquet",
    ".jsonl": "JSON lines",
    ".ndjson": "JSON lines",
    "": "a folder of the library datasets",
}
_BATCH_ROWS = 256
# Columns whose values repeat from row to row. Dictionaries of tokens or log-probabilities take most of the time of an export, and more bytes.
_REPEATED = [
    "buffer_id", "run", "baseline", "taskset", "task_key", "task_payload", "task_features", "outcome", "error", "source", "prompt", "messages",
    "finish_reason",
]  # fmt: skip


def check_format(path: Path) -> None:
    """Refuse a path whose suffix is not that of a format.

    Raises:
        QueryError: with the allowed suffixes.
    """
    if path.suffix not in FORMATS:
        allowed = ", ".join(f"{suffix or 'no suffix'} ({name})" for suffix, name in FORMATS.items())
        raise QueryError("files of this kind are neither written nor read", value=str(path), allowed=allowed)


def check_exists(path: Path) -> None:
    """Refuse a path that is not there or has the suffix of no format.

    Raises:
        QueryError: with what is allowed.
    """
    check_format(path)
    if not path.exists():
        raise QueryError("the file does not exist", value=str(path), todo="correct the path")


@contextmanager
def written(path: Path) -> Iterator[Write]:
    """Yield a function that writes batches of rows. When the block ends without an error, the file is in place and durable.

    Raises:
        QueryError: the path exists, has an unknown suffix or cannot be written.
    """
    check_format(path)
    if path.exists():
        raise QueryError("the file already exists", value=str(path), todo="remove it or choose another name")
    draft = path.with_name(f"{path.name}.unfinished")
    try:
        _remove(draft)
        with _opened(path.suffix, draft) as write:
            yield write
        for file in [draft, *draft.rglob("*")]:
            sync_path(file)
        draft.rename(path)
        sync_path(path.parent)
    except OSError as error:
        raise QueryError(
            f"{path} cannot be written: {error.strerror or error}", todo="choose another place, or free some space"
        ) from error
    finally:
        _remove(draft)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def _opened(suffix: str, draft: Path) -> Iterator[Write]:
    if suffix == ".parquet":
        with (
            pa.parquet.ParquetWriter(draft, SCHEMA, compression="zstd", use_dictionary=_REPEATED) as writer,
            _behind(writer) as write,
        ):
            yield write
    elif suffix:
        with open(draft, "x", encoding="utf-8") as file:
            yield lambda rows: file.writelines(to_json(row) + "\n" for row in rows)
    else:
        datasets = _datasets()
        stream = draft.with_name(f"{draft.name}.arrow")
        try:
            with pa.ipc.new_stream(str(stream), SCHEMA) as writer, _behind(writer) as write:
                yield write
            # Mapped, because save_to_disk copies it piece by piece.
            datasets.Dataset.from_file(str(stream)).save_to_disk(str(draft))
        finally:
            stream.unlink(missing_ok=True)


@contextmanager
def _behind(writer: Any) -> Iterator[Write]:
    """Yield a function that returns while another thread writes its rows; it waits for those before them."""
    with ThreadPoolExecutor(1, thread_name_prefix="export") as pool:
        pending: list[Future[None]] = []

        def write_rows(rows: list[Row]) -> None:
            table = _table(rows)
            while pending:
                pending.pop().result()
            pending.append(pool.submit(writer.write_table, table))

        yield write_rows
        for last in pending:
            last.result()


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise QueryError(
            "folders of the library datasets need that library",
            todo="`pip install 'rftdata[hf]'`, or use a name that ends in .parquet or .jsonl",
        ) from error
    datasets.disable_progress_bars()
    return datasets


def _table(rows: list[Row]) -> pa.Table:
    return pa.table([pa.array([row[f.name] for row in rows], f.type) for f in SCHEMA], schema=SCHEMA)


def read(path: Path) -> Iterator[tuple[str, Row]]:
    """Yield rows, each with its place for messages. Base arrays are numpy arrays; missing columns are None.

    Raises:
        QueryError: the file does not exist, has another format, or lacks a required column.
    """
    check_exists(path)
    try:
        yield from _lines(path) if path.suffix in (".jsonl", ".ndjson") else _arrow_rows(path)
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise QueryError(
            f"{path} cannot be read: {' '.join(str(error).split())}", todo="correct the path or the file"
        ) from error


def _lines(path: Path) -> Iterator[tuple[str, Row]]:
    with open(path, encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            place = f"line {number} of {path}"
            try:
                row = from_json(line)
            except (ValueError, TypeError, OverflowError, KeyError, AttributeError) as error:
                raise QueryError(
                    f"{place} cannot be read: {error}", todo="correct the line; nothing was imported"
                ) from error
            _check_columns(row, place)
            yield place, dict.fromkeys(SCHEMA.names) | row


def _arrow_rows(path: Path) -> Iterator[tuple[str, Row]]:
    number, where = 0, str(path)
    for batch in _parquet(path) if path.suffix == ".parquet" else _dataset(path):
        _check_columns(batch.schema.names, str(path))
        columns: dict[str, pa.Array] = {}
        for name in set(SCHEMA.names) & set(batch.schema.names):
            try:
                columns[name] = batch.column(name).cast(SCHEMA.field(name).type)
            except pa.ArrowException as error:
                raise QueryError(
                    f"the column {name} of {path} cannot be read: {' '.join(str(error).split())}",
                    value=str(batch.schema.field(name).type), allowed=str(SCHEMA.field(name).type), todo="correct the file; nothing was imported",
                ) from error  # fmt: skip
        for row in rows_of(columns, batch.num_rows, SCHEMA.names):
            number += 1
            yield f"row {number} of {where}", row


def _parquet(path: Path) -> Iterator[pa.RecordBatch]:
    with contextlib.closing(pa.parquet.ParquetFile(path)) as file:
        yield from one_ahead(file.iter_batches(_BATCH_ROWS))


def _dataset(path: Path) -> Iterator[pa.RecordBatch]:
    if not (path / "state.json").is_file():
        raise QueryError(
            "this is not a dataset folder", value=str(path), allowed="what `Dataset.save_to_disk` or rft export writes",
            todo="name a folder that contains state.json, or a .parquet or .jsonl file",
        )  # fmt: skip
    found = _datasets().load_from_disk(os.fspath(path)).with_format("arrow")
    for table in found.iter(_BATCH_ROWS):
        yield from table.combine_chunks().to_batches()


def _check_columns(names: Iterable[str], place: str) -> None:
    missing = [name for name in REQUIRED if name not in names]
    if missing:
        raise QueryError(
            f"{place} lacks {', '.join(missing[:5])}" + (f" and {len(missing) - 5} more" if len(missing) > 5 else ""),
            todo="import what `rft export` wrote, or give the file the columns that `rft docs move-data` lists",
        )
