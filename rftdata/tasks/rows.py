"""Rows of a source become tasks: prompt, answer and metadata, a stable key, and one of three disjoint splits.

A source yields mappings. `prompt` and `answer` name the columns that matter; everything else a row has is kept under
`metadata` for the reward, but `features`, where it is a mapping: numbers and tags for selectors and scores. A row's key is its
`task_key` column, else a digest of its prompt, so loading again finds the same rows and repeated questions count once. Rows that a
source gives one `task_key` must say the same.

Splits are disjoint by construction: a task belongs to train, validation or test by the hash of its split key, which is its
`split_key` column, else the sorted numbers of its prompt (so `3 + 14` and `14 - 3` stay together), else its text.
"""

from __future__ import annotations

import decimal
import json
import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass
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
# Keys are indexed together with the set's name; an index entry holds some 2,700 bytes.
_MAX_KEY_BYTES = 1000


@dataclass
class Repeats:
    """Rows that were left out because an earlier one has their prompt, though they have another answer.

    Attributes:
        rows: how many.
        example: numbers of one of them and of the earlier one, and the prompt.
    """

    rows: int = 0
    example: tuple[int, int, str] = (0, 0, "")

    def sentence(self) -> str:
        """For people."""
        number, first, prompt = self.example
        return (
            f"rows left out that have an earlier row's prompt and another answer: {self.rows:,}, such as row {number}, "
            f"which repeats row {first} ({prompt[:60]!r}); with a task_key of their own they would stay"
        )


def read_tasks(
    config: TasksetConfig, base_dir: Path, database: Database | None = None, repeats: Repeats | None = None
) -> Generator[dict[str, Any], None, None]:
    """Tasks of a source, split and limited, each once: task_key, split_key, payload, features. One row is held at a time.

    Args:
        base_dir: folder that relative paths in the source start from.
        database: what a `sql:` source without a URL asks.
        repeats: is told of rows that are left out though they have another answer than an earlier one.

    Raises:
        TaskSourceError: the source cannot be read, a row of it is no task, or two rows of one `task_key` differ.
    """
    seen = _Seen(config, repeats or Repeats())
    split_of_text: dict[int, str] = {}
    for number, row in enumerate(source_rows(config, base_dir, database), start=1):
        try:
            task, is_named = _task(config, row, number)
        except RecursionError:
            raise TaskSourceError(
                f"row {number} of the taskset {config.name!r} is nested too deeply",
                todo="mend or remove it in its source",
            ) from None
        if config.split:
            # One text never lies in two splits, whatever split keys its rows have: the first row decides.
            text = xxhash.xxh3_64_intdigest("".join(json.dumps(task["payload"]["prompt"]).casefold().split()).encode())
            if split_of_text.setdefault(text, split_of(task["split_key"], config.split_shares)) != config.split:
                continue
        if not seen.is_new(task, number, is_named=is_named):
            continue
        yield task
        if config.limit is not None and len(seen) >= config.limit:
            return


class _Seen:
    """Keys of the rows so far. There may be millions: of a row it keeps two numbers, a digest of its key, and one of its content with its place."""

    def __init__(self, config: TasksetConfig, repeats: Repeats) -> None:
        self._config, self._repeats = config, repeats
        self._rows: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def is_new(self, task: dict[str, Any], number: int, *, is_named: bool) -> bool:
        """Whether it is the first of its key.

        Raises:
            TaskSourceError: it has the `task_key` of an earlier row and says something else.
        """
        payload = task["payload"]
        # Rows of one prompt may differ in where they come from; two answers to it contradict each other.
        content = [payload, task["features"]] if is_named else payload["answer"]
        digest = xxhash.xxh3_64_intdigest(json.dumps(content, sort_keys=True).encode())
        known = self._rows.setdefault(xxhash.xxh3_128_intdigest(task["task_key"].encode()), number << 64 | digest)
        first, first_digest = known >> 64, known & (1 << 64) - 1
        if first == number:
            return True
        if first_digest == digest:
            return False
        if is_named:
            raise TaskSourceError(
                f"rows {first} and {number} of the taskset {self._config.name!r} have one task_key and differ",
                value=task["task_key"], todo="give every task a task_key of its own in its source, or leave the column out",
            )  # fmt: skip
        self._repeats.rows += 1
        if self._repeats.rows == 1:
            prompt = payload["prompt"]
            self._repeats.example = (number, first, prompt if isinstance(prompt, str) else json.dumps(prompt))
        return False


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


def _task(config: TasksetConfig, row: Any, number: int) -> tuple[dict[str, Any], bool]:
    """A row as a task, and whether its key is one that the source gave it."""
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
    prompt = _prompt(config, row[config.prompt], number)
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, default=_plain)
    features = row.pop("features") if isinstance(row.get("features"), Mapping) else {}
    rest = {k: v for k, v in row.items() if k not in (config.prompt, config.answer, "task_key", "split_key")}
    payload = {"prompt": prompt, "answer": _answer(row.get(config.answer)), "metadata": rest}
    task_key = _given(row, "task_key")
    if task_key is not None and len(task_key.encode()) > _MAX_KEY_BYTES:
        raise TaskSourceError(
            f"row {number} of the taskset {config.name!r} has a task_key of {len(task_key):,} characters", value=f"{task_key[:60]}…",
            allowed=f"up to {_MAX_KEY_BYTES:,} bytes", todo="give it a shorter one in its source, such as a digest of this one",
        )  # fmt: skip
    return {
        "task_key": task_key or xxhash.xxh3_128_hexdigest(text.encode()),
        "split_key": _given(row, "split_key") or default_split_key(text),
        "payload": _as_json(payload),
        "features": _as_json(features) if features else {},
    }, task_key is not None


def _prompt(config: TasksetConfig, prompt: Any, number: int) -> str | list[Any]:
    """Of a row, checked."""
    if not isinstance(prompt, str | list) or not prompt or (isinstance(prompt, str) and not prompt.strip()):
        what = f"has no prompt in its column {config.prompt!r}"
    elif isinstance(prompt, list) and not all(map(_is_message, prompt)):
        what = f"has a list in its column {config.prompt!r} that is no chat"
    else:
        return prompt
    raise TaskSourceError(
        f"row {number} of the taskset {config.name!r} {what}", value=prompt, allowed="a text, or a list of chat messages with role and content",
        todo="mend or remove the row in its source",
    )  # fmt: skip


def _is_message(turn: Any) -> bool:
    return isinstance(turn, Mapping) and isinstance(turn.get("role"), str) and "content" in turn


def _answer(value: Any) -> str | None:
    """As a text: of a mapping, a list or a truth value its JSON."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool | dict | list):
        return json.dumps(value, default=_plain, ensure_ascii=False)
    return str(value)


def _given(row: dict[str, Any], column: str) -> str | None:
    """A key that the source gives a row; 0 is one."""
    value = row.get(column)
    return None if value is None or value == "" else str(value)


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value, default=_plain))


def _plain(value: Any) -> Any:
    """A value that JSON does not know: numbers stay numbers, everything else is its text."""
    if isinstance(value, decimal.Decimal):
        return float(value) if value.is_finite() else None
    return str(value)
