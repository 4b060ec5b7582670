"""Tasksets: from a source to rows of `rft.task`, once, with stable keys.

A source is read again when its digest has changed. What is stored stays comparable: once a group was planned on a task of the
set, or the set was part of an evaluation, a task whose content differs is refused, never silently kept nor changed.

A source yields mappings. `prompt` and `answer` name the columns that matter; everything else a row has is kept under
`metadata` for the reward. A row's key is its `task_key` column, else a digest of its prompt, so loading again finds the same
rows and repeated questions count once.

Splits are disjoint by construction: a task belongs to train, validation or test by the hash of its split key, which is its
`split_key` column, else the sorted numbers of its prompt (so `3 + 14` and `14 - 3` stay together), else its text.
"""

from __future__ import annotations

import csv
import difflib
import json
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import xxhash
from psycopg.types.json import Jsonb

from rftdata import plugins
from rftdata.config import TasksetConfig
from rftdata.database import Connection, Database, Row, copy_rows, execute, fetch, storable
from rftdata.errors import TaskSourceError

_SPLITS = ("train", "validation", "test")
_READERS = (".jsonl", ".csv", ".parquet")


def load_taskset(database: Database, config: TasksetConfig, base_dir: Path) -> int:
    """Load a taskset; how many tasks it has.

    Args:
        base_dir: folder that relative paths in the source start from.

    Raises:
        TaskSourceError: unreadable source, wrong column name, no task left, another source under the same name, or tasks that
            changed after they were used.
    """
    args = {
        "args": config.args, "split": config.split, "shares": list(config.split_shares), "limit": config.limit,
        "prompt": config.prompt, "answer": config.answer,
    }  # fmt: skip
    args = json.loads(json.dumps(args))
    digest = _digest(config, base_dir)
    known = database.fetch("find_taskset", taskset=config.name)
    stored = known[0]["args"] if known else {}
    stored_digest = stored.pop("digest", None)
    if known and (known[0]["source"], stored) != (config.source, args):
        raise TaskSourceError(
            f"the buffer already holds a taskset {config.name!r} from another source or with other arguments",
            value=config.source,
            allowed=f"{known[0]['source']} with {stored}",
            todo="give this one another name, or use another buffer",
        )
    if known and digest == stored_digest:
        return int(known[0]["num_tasks"])  # generators are deterministic: nothing can have changed
    tasks = list(read_tasks(config, base_dir))
    if not tasks:
        raise TaskSourceError(
            f"the taskset {config.name!r} has no task", value=config.source, todo="check its split, limit and arguments"
        )
    with database.transaction() as connection:
        execute(connection, "stage_tasks")
        rows = ((i, task["task_key"], task["payload"], task["features"]) for i, task in enumerate(tasks))
        copy_rows(
            connection,
            "staged_task",
            [("position", "int8"), ("task_key", "text"), ("payload", "jsonb"), ("features", "jsonb")],
            rows,
        )
        _replace_changed(connection, config.name)
        execute(connection, "merge_tasks", taskset=config.name)
        num_tasks = fetch(connection, "count_tasks", taskset=config.name)[0]["n"]
        execute(
            connection, "save_taskset", taskset=config.name, source=config.source, args=Jsonb({**args, "digest": digest}),
            num_tasks=num_tasks,
        )  # fmt: skip
    return int(num_tasks)


def _replace_changed(connection: Connection, taskset: str) -> None:
    """Give stored tasks the content they have now, unless something was made of them already."""
    changed = fetch(connection, "changed_tasks", taskset=taskset)[0]
    if not changed["n"]:
        return
    if fetch(connection, "taskset_is_used", taskset=taskset)[0]["used"]:
        raise TaskSourceError(
            f"{changed['n']} of the tasks stored as {taskset!r} differ from their source by now, and some of the set were "
            f"tried already; for example task {changed['task_key']!r} was {_shown(changed['stored'])}",
            value=_shown(changed["now"]),
            todo="give the changed taskset another name, or restore its source",
        )
    execute(connection, "replace_tasks", taskset=taskset)


def _shown(payload: dict[str, Any]) -> str:
    text = json.dumps(payload, ensure_ascii=False)
    return text if len(text) <= 300 else f"{text[:299]}…"


def _digest(config: TasksetConfig, base_dir: Path) -> str | None:
    """Of the file that a source is or is written in; None when it is neither."""
    name = config.source if config.source.endswith(_READERS) else config.source.partition(".py:")[0] + ".py"
    path = base_dir / name
    if not path.is_file():
        return None
    state = xxhash.xxh3_128()
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                state.update(block)
    except OSError as error:
        raise TaskSourceError(
            f"the file of the taskset {config.name!r} cannot be read: {error.strerror}", value=str(path), todo="mend it"
        ) from error
    return state.hexdigest()


def list_tasksets(database: Database) -> list[Row]:
    """Tasksets in the buffer."""
    return database.fetch("list_tasksets")


def read_tasks(config: TasksetConfig, base_dir: Path) -> Iterator[dict[str, Any]]:
    """Tasks of a source, split and limited, each once: task_key, split_key, payload, features."""
    seen: set[str] = set()
    split_of_text: dict[int, str] = {}
    for number, row in enumerate(_rows(config, base_dir), start=1):
        task = _task(config, row, number)
        if config.split:
            # One text never lies in two splits, whatever split keys its rows have: the first row decides.
            text = xxhash.xxh3_64_intdigest("".join(json.dumps(task["payload"]["prompt"]).casefold().split()).encode())
            if split_of_text.setdefault(text, split_of(task["split_key"], config.split_shares)) != config.split:
                continue
        if task["task_key"] in seen:
            continue
        seen.add(task["task_key"])
        yield task
        if config.limit is not None and len(seen) >= config.limit:
            return


def split_of(split_key: str, shares: tuple[float, float, float]) -> str:
    """train, validation or test, by the hash of a key alone."""
    place = xxhash.xxh3_64_intdigest(split_key.encode()) / 2**64
    for split, share in zip(_SPLITS, shares, strict=True):
        if place < share:
            return split
        place -= share
    return _SPLITS[-1]


def default_split_key(prompt: str) -> str:
    """Sorted numbers of the prompt; its text without case and space when it has none."""
    numbers = re.findall(r"\d+", prompt)
    return ",".join(sorted(numbers, key=lambda n: (len(n), n))) if numbers else "".join(prompt.casefold().split())


def _task(config: TasksetConfig, row: Any, number: int) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        raise TaskSourceError(
            f"row {number} of the taskset {config.name!r} is no mapping of columns to values",
            value=row,
            todo="mend its source",
        )
    row = storable(row)
    if config.prompt not in row:
        raise TaskSourceError(
            f"the taskset {config.name!r} has no column {config.prompt!r} (row {number})",
            allowed=", ".join(sorted(map(str, row))),
            todo=f"name the column with the prompt: `prompt: …` in the taskset {config.name!r}",
        )
    prompt = row[config.prompt]
    text = prompt if isinstance(prompt, str) else json.dumps(prompt)
    rest = {
        k: v for k, v in row.items() if k not in (config.prompt, config.answer, "task_key", "split_key", "features")
    }
    answer = row.get(config.answer)
    payload = {"prompt": prompt, "answer": None if answer is None else str(answer), "metadata": rest}
    return {
        "task_key": str(row.get("task_key") or xxhash.xxh3_128_hexdigest(text.encode())),
        "split_key": str(row.get("split_key") or default_split_key(text)),
        "payload": json.loads(json.dumps(payload, default=str)),
        "features": row.get("features") or {},
    }


def _rows(config: TasksetConfig, base_dir: Path) -> Iterable[dict[str, Any]]:
    kind, _, name = config.source.partition(":")
    if kind == "reasoning_gym":
        return _reasoning_gym(config, name)
    if config.source.endswith(_READERS):
        return _file(config, base_dir / config.source)
    if ".py:" in config.source:
        generator = plugins.load("task source", config.source, {}, base_dir)
        return _generated(config, generator)
    raise TaskSourceError(
        f"the taskset {config.name!r} has an unknown kind of source", value=config.source,
        allowed=f"reasoning_gym:NAME, a file ({', '.join(_READERS)}), ./file.py:function", todo="correct its source",
    )  # fmt: skip


def _reasoning_gym(config: TasksetConfig, name: str) -> Iterator[dict[str, Any]]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of a package of theirs, when it is compiled
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise TaskSourceError("reasoning_gym is not installed", todo="pip install reasoning-gym") from error
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=3)
        raise TaskSourceError(
            f"reasoning_gym has no generator {name!r}",
            allowed=", ".join(near) or f"{len(DATASETS)} names",
            todo=f"correct the taskset {config.name!r}",
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


def _generated(config: TasksetConfig, generator: Any) -> Iterator[dict[str, Any]]:
    try:
        yield from generator(**config.args)
    except Exception as error:
        raise TaskSourceError(
            f"the task source {config.source!r} raised {type(error).__name__}: {error}", todo="mend it, or its args"
        ) from error


def _file(config: TasksetConfig, path: Path) -> Iterator[dict[str, Any]]:
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
        else:
            import pyarrow.parquet

            for batch in pyarrow.parquet.ParquetFile(path).iter_batches():
                yield from batch.to_pylist()
    except (OSError, ValueError, csv.Error, pa.ArrowException) as error:
        raise TaskSourceError(
            f"the file of the taskset {config.name!r} cannot be read: {' '.join(str(error).split())}",
            value=str(path),
            todo="mend or replace it",
        ) from error


def _csv_rows(path: Path) -> Iterator[dict[str, Any]]:
    # Every value stays the text it is: an answer 0.50 must not become 0.5.
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        for row in reader:
            if None in row or None in row.values():
                raise ValueError(
                    f"line {reader.line_num} has not the {len(reader.fieldnames or ())} fields of the header"
                )
            yield row


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    yield json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"line {number} is not JSON: {error}") from error
