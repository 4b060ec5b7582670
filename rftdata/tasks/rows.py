"""Rows of a source become tasks: prompt, answer and metadata, a stable key, and one of three disjoint splits.

A source yields mappings. `prompt` and `answer` name the columns that matter; everything else a row has is kept under
`metadata` for the reward, but `features`, where it is a mapping: numbers and tags for selectors and scores. A row's key is its
`task_key` column, else a digest of its prompt, so loading again finds the same rows and repeated questions count once.

Splits are disjoint by construction: a task belongs to train, validation or test by the hash of its split key, which is its
`split_key` column, else the sorted numbers of its prompt (so `3 + 14` and `14 - 3` stay together), else its text.
"""

from __future__ import annotations

import decimal
import json
import re
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from rftdata.config import TasksetConfig
from rftdata.database import storable
from rftdata.errors import TaskSourceError
from rftdata.tasks.sources import source_rows

if TYPE_CHECKING:
    from rftdata.database import Database

_SPLITS = ("train", "validation", "test")


def read_tasks(
    config: TasksetConfig, base_dir: Path, database: Database | None = None
) -> Generator[dict[str, Any], None, None]:
    """Tasks of a source, split and limited, each once: task_key, split_key, payload, features. One row is held at a time.

    Args:
        base_dir: folder that relative paths in the source start from.
        database: what a `sql:` source without a URL asks.

    Raises:
        TaskSourceError: the source cannot be read, or a row of it is no task.
    """
    seen: set[str] = set()
    split_of_text: dict[int, str] = {}
    for number, row in enumerate(source_rows(config, base_dir, database), start=1):
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
    row = storable(dict(row))
    if config.prompt not in row:
        raise TaskSourceError(
            f"the taskset {config.name!r} has no column {config.prompt!r} (row {number})",
            allowed=", ".join(sorted(map(str, row))),
            todo=f"name the column with the prompt: `prompt: …` in the taskset {config.name!r}",
        )
    prompt = row[config.prompt]
    if not isinstance(prompt, str | list) or not prompt or (isinstance(prompt, str) and not prompt.strip()):
        raise TaskSourceError(
            f"row {number} of the taskset {config.name!r} has no prompt in its column {config.prompt!r}", value=prompt,
            allowed="a text, or a list of chat messages", todo="mend or remove the row in its source",
        )  # fmt: skip
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, default=_plain)
    features = row.pop("features") if isinstance(row.get("features"), Mapping) else {}
    rest = {k: v for k, v in row.items() if k not in (config.prompt, config.answer, "task_key", "split_key")}
    answer = row.get(config.answer)
    payload = {"prompt": prompt, "answer": None if answer is None else str(answer), "metadata": rest}
    return {
        "task_key": str(row.get("task_key") or xxhash.xxh3_128_hexdigest(text.encode())),
        "split_key": str(row.get("split_key") or default_split_key(text)),
        "payload": _as_json(payload),
        "features": _as_json(features) if features else {},
    }


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value, default=_plain))


def _plain(value: Any) -> Any:
    """A value that JSON does not know: numbers stay numbers, everything else is its text."""
    if isinstance(value, decimal.Decimal):
        return float(value) if value.is_finite() else None
    return str(value)
