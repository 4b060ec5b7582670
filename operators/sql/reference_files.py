"""Reference files of a stage: Parquet, CSV or JSON lines, read completely into Arrow."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pyarrow as pa
import xxhash

from rftdata.errors import ConfigError

FORMATS = (".parquet", ".csv", ".jsonl")


def resolve(base_dir: Path, name: str) -> Path:
    """Return the path of a file, relative to the configuration file.

    Raises:
        ConfigError: it does not exist, or its format is not supported.
    """
    path = (base_dir / name).resolve()
    if path.suffix.lower() not in FORMATS:
        raise ConfigError("this file format is not supported", value=name, allowed=", ".join(FORMATS))
    if not path.is_file():
        raise ConfigError(
            "the file does not exist", value=str(path), todo="paths are relative to the configuration file"
        )
    return path


def read(path: Path) -> pa.Table:
    """Read the file as a table.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        # Imported here, because most stages read no file.
        if path.suffix.lower() == ".parquet":
            import pyarrow.parquet

            return pyarrow.parquet.read_table(path)
        if path.suffix.lower() == ".csv":
            import pyarrow.csv

            return pyarrow.csv.read_csv(path)
        import pyarrow.json

        return pyarrow.json.read_json(path)
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"the file cannot be read: {error}", value=str(path), todo="repair or replace it") from error


def empty(path: Path) -> pa.Table:
    """Return the file's columns without its rows."""
    if path.suffix.lower() != ".parquet":
        return read(path).slice(0, 0)
    try:
        import pyarrow.parquet

        return pyarrow.parquet.read_schema(path).empty_table()
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"the file cannot be read: {error}", value=str(path), todo="repair or replace it") from error


def digest(path: Path) -> str:
    """Digest a file's content, or all files below a folder, so that changed content gives another pipeline version.

    Empty if it does not exist.
    """
    try:
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.is_file())
            listed = "\n".join(f"{file.relative_to(path)} {digest(file)}" for file in files)
            return xxhash.xxh3_128_hexdigest(listed.encode(errors="surrogateescape"))[:16]
        state = path.stat()
    except OSError:
        return ""
    return _digest(path, state.st_size, state.st_mtime_ns)


@lru_cache(maxsize=64)
def _digest(path: Path, _size: int, _changed: int) -> str:
    hashed = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            hashed.update(block)
    return hashed.hexdigest()[:16]
