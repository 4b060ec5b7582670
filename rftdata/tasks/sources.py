"""Sources of tasksets: one function per kind of source, each a stream of mappings.

| source | what it is |
| --- | --- |
| `reasoning_gym:NAME` | a generator of that package with its own `args` |
| `data.jsonl`, `.csv`, `.parquet` | a file |
| `folder/` | what `Dataset.save_to_disk` of the library datasets wrote, or a folder of such files |
| `hf:OWNER/NAME` | a data set of the Hugging Face hub, or of its cache on this machine |
| `verifiers:NAME` | the tasks of an environment of the package verifiers, see `rftdata.tasks.verifiers` |
| `sql: SELECT …` | a query on the buffer itself, or on another PostgreSQL |
| `./file.py:function` | your own generator; `args` are its arguments |
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rftdata.config import TasksetConfig
from rftdata.config_errors import did_you_mean
from rftdata.errors import TaskSourceError, TimeLimitError
from rftdata.plugins import Registry
from rftdata.postgres.database import Database
from rftdata.tasks import files, hub, query, verifiers
from rftdata.user_code.time_limits import call

# Users' own generators; the other kinds of source are recognised by their form.
TASK_SOURCES = Registry[Callable[..., Iterable[Any]]]("task source", {})

_END = object()
KINDS = f"reasoning_gym:NAME, a file ({', '.join(files.READERS)}), a folder, hf:OWNER/NAME, verifiers:NAME, sql: SELECT …, ./file.py:function"


@dataclass(frozen=True)
class Fingerprint:
    """The state of a source, by which a change is detected.

    Attributes:
        digest: digest of its content; None if it cannot change (a generator with a seed).
        volatile: whether it must be read to see whether it changed.
        unreachable: whether it is unavailable now; the stored set is then used as it is.
    """

    digest: str | None = None
    volatile: bool = False
    unreachable: bool = False


def fingerprint(config: TasksetConfig, base_dir: Path) -> Fingerprint:
    """Return the fingerprint of the source as it is now.

    Raises:
        TaskSourceError: an existing file cannot be read.
    """
    if query.is_query(config.source) or verifiers.is_verifiers(config.source):
        return Fingerprint(volatile=True)
    if hub.is_hub(config.source):
        revision = hub.revision(config)
        return Fingerprint(revision, unreachable=revision is None)
    name = config.source
    if ".py:" in name:
        name = name.partition(".py:")[0] + ".py"
    elif _is_generator(name):
        return Fingerprint()
    return Fingerprint(files.digest(config, base_dir / name))


@dataclass
class TimedReading:
    """How far sources were read.

    Attributes:
        seconds: how long a source is read after its first row.
        num_rows: number of rows of the source that was read last.
        was_cut: whether time was up before that source ended.
    """

    seconds: float
    num_rows: int = 0
    was_cut: bool = False


_reading: ContextVar[TimedReading | None] = ContextVar("reading", default=None)


@contextlib.contextmanager
def reading_for(seconds: float) -> Iterator[TimedReading]:
    """End every source within `seconds` after its first row, so that endless sources can be checked."""
    reading = TimedReading(seconds)
    token = _reading.set(reading)
    try:
        yield reading
    finally:
        _reading.reset(token)


def was_cut() -> bool:
    """Return whether `reading_for` ended the source that was read last."""
    reading = _reading.get()
    return reading is not None and reading.was_cut


def source_rows(config: TasksetConfig, base_dir: Path, database: Database | None = None) -> Iterator[Any]:
    """Yield the rows of a taskset's source, one at a time.

    Raises:
        TaskSourceError: the source cannot be read, or did not yield its next row within `timeout_s`.
    """
    reading = _reading.get()
    # The hub downloads files first, which may take long; commands with lower time limits do not interrupt that.
    cap = not hub.is_hub(config.source)
    rows: Iterator[Any] | None = None
    number, until = 1, float("inf")
    if reading is not None:
        reading.num_rows, reading.was_cut = 0, False

    def next_row() -> Any:
        nonlocal rows
        if rows is None:
            rows = iter(_rows(config, base_dir, database))
        return next(rows, _END)

    try:
        while time.monotonic() <= until:
            what = f"row {number} of the task source {config.source!r}"
            try:
                row = call(next_row, config.timeout_s, what, cap=cap)
            except TimeLimitError as error:
                raise _time_limit_error(config, error) from error
            if row is _END:
                return
            if reading is not None:
                reading.num_rows = number
                # Only the first row may take longer, since a source may load something first.
                until = time.monotonic() + reading.seconds if number == 1 else until
            yield row
            number += 1
        if reading is not None:
            reading.was_cut = True
    finally:
        if isinstance(rows, Generator):
            rows.close()  # a query's connection, a user's generator


def _time_limit_error(config: TasksetConfig, error: TimeLimitError) -> TaskSourceError:
    return TaskSourceError(
        f"{error.what} (taskset {config.name!r})",
        allowed=error.allowed,
        todo=f"correct it, or raise timeout_s of the taskset {config.name!r}",
    )


def _rows(config: TasksetConfig, base_dir: Path, database: Database | None) -> Iterable[Any]:
    source = config.source
    if query.is_query(source):
        return query.rows(config, database)
    if hub.is_hub(source):
        return hub.rows(config)
    if verifiers.is_verifiers(source):
        return verifiers.rows(config, base_dir)
    if _is_generator(source):
        return _reasoning_gym(config, source.partition(":")[2])
    if source.endswith(files.READERS):
        files.refuse_args(config)
        return files.file_rows(config, base_dir / source)
    if ".py:" in source:
        return _generated(config, TASK_SOURCES.load(source, base_dir))
    if source.endswith("/") or (base_dir / source).is_dir():
        return files.folder_rows(config, base_dir / source)
    raise TaskSourceError(
        f"the taskset {config.name!r} has an unknown kind of source",
        value=source,
        allowed=KINDS,
        todo="correct its source; a path is relative to the configuration file",
    )


def _is_generator(source: str) -> bool:
    return source.startswith("reasoning_gym:")


def _reasoning_gym(config: TasksetConfig, name: str) -> Iterator[dict[str, Any]]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # from one of its dependencies when it is compiled
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise TaskSourceError("reasoning_gym is not installed", todo="pip install reasoning-gym") from error
    if name not in DATASETS:
        raise TaskSourceError(
            f"reasoning_gym has no generator {name!r}",
            allowed=f"the {len(DATASETS)} names in reasoning_gym.factory.DATASETS",
            todo=did_you_mean(name, DATASETS, f"correct the taskset {config.name!r}", most=3),
        )
    try:
        dataset = reasoning_gym.create_dataset(name, **{"seed": 0, "size": 1000, **config.args})
    except (TypeError, AssertionError, ValueError) as error:
        raise TaskSourceError(
            f"reasoning_gym:{name} refuses its arguments: {error}",
            value=config.args,
            todo=f"correct args of the taskset {config.name!r}",
        ) from error
    for entry in dataset:
        yield {**entry["metadata"], "question": entry["question"], "answer": entry["answer"], "generator": name}


def _generated(config: TasksetConfig, generator: Callable[..., Iterable[Any]]) -> Iterator[Any]:
    try:
        yield from generator(**config.args)
    except Exception as error:
        raise TaskSourceError(
            f"the task source {config.source!r} raised {type(error).__name__}: {error}", todo="correct it or its args"
        ) from error
