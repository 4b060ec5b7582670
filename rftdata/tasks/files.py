"""Rows of files: JSON lines, CSV, Parquet, and folders of them or of the library datasets. No file is read at once."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import xxhash

from rftdata.config import TasksetConfig
from rftdata.errors import TaskSourceError

READERS = (".jsonl", ".csv", ".parquet")
_BATCH_ROWS = 4096


def digest(config: TasksetConfig, path: Path) -> str | None:
    """Digest a file's bytes, or the names and bytes of a folder's data files; None if the path does not exist.

    Raises:
        TaskSourceError: it cannot be read.
    """
    state = xxhash.xxh3_128()
    if path.is_dir():
        files = [*_data_files(config, path)]
    elif path.is_file():
        files = [path]
    else:
        return None
    for file in files:
        try:
            if file != path:
                state.update(f"{file.relative_to(path)}\0{file.stat().st_size}\0".encode())
            with file.open("rb") as content:
                while block := content.read(1 << 20):
                    state.update(block)
        except OSError as error:
            raise TaskSourceError(
                f"the file of the taskset {config.name!r} cannot be read: {error.strerror}",
                value=str(file),
                todo="repair or replace it",
            ) from error
    return state.hexdigest()


def refuse_args(config: TasksetConfig) -> None:
    """Refuse arguments for a file, which has none.

    Raises:
        TaskSourceError: the taskset has arguments.
    """
    if not config.args:
        return
    key = min(config.args)
    beside = key in ("split", "limit", "prompt", "answer")
    raise TaskSourceError(
        f"the taskset {config.name!r} gives its file the argument {key!r}, but a file has no arguments",
        value=config.args,
        allowed="args for a folder: split, files; beside args: split, limit, prompt, answer",
        todo=f"write {key} beside args instead of in it"
        if beside
        else "leave args out; a CSV file has commas between its values and a header",
    )


def file_rows(config: TasksetConfig, path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of one file.

    Raises:
        TaskSourceError: it is missing or damaged; names the line.
    """
    if not path.is_file():
        wrong = "is a folder" if path.is_dir() else "does not exist"
        raise TaskSourceError(
            f"the file of the taskset {config.name!r} {wrong}",
            value=str(path),
            todo="correct its source; it is relative to the configuration file",
        )
    try:
        if path.suffix == ".jsonl":
            yield from _json_lines(path)
        elif path.suffix == ".csv":
            yield from _csv_rows(path)
        elif path.suffix == ".arrow":
            yield from _arrow_rows(path)
        else:
            import pyarrow.parquet

            for batch in pyarrow.parquet.ParquetFile(path).iter_batches(_BATCH_ROWS):
                yield from batch.to_pylist()
    except (OSError, ValueError, csv.Error, pa.ArrowException) as error:
        raise TaskSourceError(
            f"the file of the taskset {config.name!r} cannot be read: {' '.join(str(error).split())}",
            value=str(path),
            todo="repair or replace it",
        ) from error


def folder_rows(config: TasksetConfig, path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a folder's data files, in the order of their names.

    Raises:
        TaskSourceError: it has no data file, the split is unknown, or as `file_rows`.
    """
    if not path.is_dir():
        raise TaskSourceError(
            f"the folder of the taskset {config.name!r} does not exist",
            value=str(path),
            todo="correct its source; it is relative to the configuration file",
        )
    files = list(_data_files(config, path))
    if not files:
        raise TaskSourceError(
            f"the folder of the taskset {config.name!r} has no data file",
            value=str(path),
            allowed=f"what Dataset.save_to_disk wrote, or {', '.join(READERS)} files"
            + (f" that match {config.args}" if config.args else ""),
            todo="correct its source or its args",
        )
    for file in files:
        yield from file_rows(config, file)


def _data_files(config: TasksetConfig, path: Path) -> Iterator[Path]:
    """Yield the data files of a folder, in order; `args` may contain `split` and, for a folder of files, the pattern `files`."""
    unknown = sorted(set(config.args) - {"split", "files"})
    if unknown:
        raise TaskSourceError(
            f"a folder of data files has no argument {unknown[0]!r}",
            allowed="split, files",
            todo=f"correct args of the taskset {config.name!r}",
        )
    split, pattern = config.args.get("split"), config.args.get("files")
    if (path / "dataset_dict.json").is_file():
        splits = _json_file(config, path / "dataset_dict.json").get("splits", [])
        if split not in splits:
            raise TaskSourceError(
                f"the data sets of the taskset {config.name!r} have no split of that name",
                value=split,
                allowed=", ".join(splits),
                todo=f"choose one: `args: {{split: {splits[0] if splits else 'train'}}}`",
            )
        yield from _saved_dataset(config, path / str(split))
    elif (path / "state.json").is_file():
        yield from _saved_dataset(config, path)
    else:
        for file in sorted(path.glob(pattern or "**/*")):
            named = split is None or file.stem.startswith(str(split)) or str(split) in file.relative_to(path).parts[:-1]
            if file.is_file() and file.suffix in READERS and named:
                yield file


def _saved_dataset(config: TasksetConfig, path: Path) -> Iterator[Path]:
    """Yield the Arrow files that `Dataset.save_to_disk` wrote, which contain selections and orders already applied."""
    state = _json_file(config, path / "state.json")
    for file in state.get("_data_files", []):
        yield path / file["filename"]


def _json_file(config: TasksetConfig, path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TaskSourceError(
            f"the data set of the taskset {config.name!r} is damaged: {error}", value=str(path), todo="write it again"
        ) from error
    return found


def _arrow_rows(path: Path) -> Iterator[dict[str, Any]]:
    with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as stream:
        for batch in stream:
            for start in range(0, batch.num_rows, _BATCH_ROWS):
                yield from batch.slice(start, _BATCH_ROWS).to_pylist()


def _csv_rows(path: Path) -> Iterator[dict[str, Any]]:
    # Every value stays the text it is, since an answer 0.50 must not become 0.5.
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(
            file, strict=True
        )  # otherwise a quote that is never closed takes the rest of the file into one value
        names = list(reader.fieldnames or ())
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"its header has the column {twice[0]!r} twice; give every column a different name")
        for row in _numbered(reader):
            if None in row or None in row.values():
                raise ValueError(f"line {reader.line_num} does not have the {len(names)} fields of the header")
            yield row


def _numbered(reader: csv.DictReader[str]) -> Iterator[dict[str, Any]]:
    try:
        yield from reader
    except csv.Error as error:
        raise ValueError(
            f"the row from line {reader.line_num + 1} on: {error}; a value in quotes ends with one"
        ) from error


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    yield json.loads(line)
                except RecursionError:
                    raise ValueError(f"line {number} is nested too deeply") from None
                except ValueError as error:  # also raised by a number of thousands of digits
                    raise ValueError(f"line {number} is not JSON: {error}") from error
