"""The three file formats, with one function that writes rows and one that reads them.

A file is written under another name and renamed when it is complete, so a partial file is never visible. An existing file is never
replaced. Reading and writing stream, so a file may be larger than memory.
"""

from __future__ import annotations

import collections
import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from rftdata.errors import QueryError
from rftdata.exchange.arrow_rows import rows_of
from rftdata.exchange.columns import REQUIRED, SCHEMA, Row, from_json, to_json
from rftdata.exchange.prefetch import prefetched
from rftdata.files.durable import draft_folder, sync_path

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
    "buffer_id",
    "run",
    "baseline",
    "taskset",
    "task_key",
    "task_payload",
    "task_features",
    "outcome",
    "error",
    "source",
    "prompt",
    "messages",
    "role",
    "finish_reason",
]


def check_format(path: Path) -> None:
    """Refuse a path whose suffix is not that of a format.

    Raises:
        QueryError: with the allowed suffixes.
    """
    if path.suffix not in FORMATS:
        allowed = ", ".join(f"{suffix or 'no suffix'} ({name})" for suffix, name in FORMATS.items())
        raise QueryError("files of this kind are neither written nor read", value=str(path), allowed=allowed)


def check_exists(path: Path) -> None:
    """Refuse a path that does not exist or has an unknown suffix.

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
        ConflictError: another process is writing it.
    """
    check_format(path)
    if path.exists():
        raise QueryError("the file already exists", value=str(path), todo="remove it or choose another name")
    try:
        with draft_folder(path) as folder:
            draft = folder / path.name
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
    nothing = dict.fromkeys(SCHEMA.names)
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            place = f"line {number} of {path}"
            try:
                row = from_json(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except ValueError as error:
                raise QueryError(
                    f"{place} cannot be read: {error}", todo="correct the line; nothing was imported"
                ) from error
            _check_columns(list(row), place)
            yield place, nothing | row


def _arrow_rows(path: Path) -> Iterator[tuple[str, Row]]:
    number = 0
    for batch in _parquet(path) if path.suffix == ".parquet" else _dataset(path):
        _check_columns(batch.schema.names, str(path))
        columns = {
            name: _cast(batch.column(name), name, number, path) for name in SCHEMA.names if name in batch.schema.names
        }
        for row in rows_of(columns, batch.num_rows, SCHEMA.names):
            number += 1
            yield f"row {number} of {path}", row


def _cast(column: pa.Array, name: str, num_before: int, path: Path) -> pa.Array:
    """Return a column of a batch as its type in `SCHEMA`.

    Args:
        num_before: number of rows before the batch.

    Raises:
        QueryError: a value cannot be of that type; names its row.
    """
    kind = SCHEMA.field(name).type
    try:
        _refuse_lost_fields(column.type, kind)
        return column.cast(kind)
    except (pa.ArrowException, TypeError) as refusal:
        place, error = str(path), refusal
        for i in range(len(column)):
            try:
                column.slice(i, 1).cast(kind)
            except pa.ArrowException as of_row:
                place, error = f"row {num_before + i + 1} of {path}", of_row
                break
        raise QueryError(
            f"{place}: the column {name} cannot be read: {' '.join(str(error).split())}",
            value=str(column.type),
            allowed=str(kind),
            todo="correct the file; nothing was imported",
        ) from error


def _refuse_lost_fields(stored: pa.DataType, kind: pa.DataType) -> None:
    """Refuse fields of elements that the type in `SCHEMA` does not have: a cast would leave them out."""
    if not pa.types.is_list(kind) or not pa.types.is_struct(kind.value_type) or not hasattr(stored, "value_type"):
        return
    if pa.types.is_struct(stored.value_type):
        unknown = {field.name for field in stored.value_type} - {field.name for field in kind.value_type}
        if unknown:
            raise TypeError(f"unknown field {min(unknown)}")


def _parquet(path: Path) -> Iterator[pa.RecordBatch]:
    with contextlib.closing(pa.parquet.ParquetFile(path)) as file:
        yield from prefetched(file.iter_batches(_BATCH_ROWS))


def _dataset(path: Path) -> Iterator[pa.RecordBatch]:
    if not (path / "state.json").is_file():
        raise QueryError(
            "this is not a dataset folder",
            value=str(path),
            allowed="what `Dataset.save_to_disk` or rft export writes",
            todo="name a folder that contains state.json, or a .parquet or .jsonl file",
        )
    dataset = _datasets().load_from_disk(os.fspath(path)).with_format("arrow")
    for table in dataset.iter(_BATCH_ROWS):
        yield from table.combine_chunks().to_batches()


def _check_columns(names: list[str], place: str) -> None:
    missing = [name for name in REQUIRED if name not in names]
    repeated = sorted(
        name for name, number in collections.Counter(names).items() if number > 1 and name in SCHEMA.names
    )
    if repeated:
        raise QueryError(f"{place} has several columns {repeated[0]}", todo="remove or rename all but one of them")
    if missing:
        raise QueryError(
            f"{place} lacks {', '.join(missing[:5])}" + (f" and {len(missing) - 5} more" if len(missing) > 5 else ""),
            todo="import what `rft export` wrote, or give the file the columns that `rft docs move-data` lists",
        )
