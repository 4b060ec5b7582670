"""Conversion of a source's rows to tasks: prompt, answer and metadata, a stable key, and one of three disjoint splits.

A source yields mappings. `prompt` and `answer` name their columns. All other columns are stored under `metadata` for the reward,
except a mapping `features`: numbers and tags for selectors and scores. A row's key is its `task_key` column, else a digest of its
prompt, so loading again finds the same rows and repeated questions count once. Rows with the same `task_key` must have the same
content.

A column that the configuration names must exist. Single rows may omit the answer, since JSON lines often omit nulls. A named column
that none of the first rows has is refused as a mistake.

A task's split (see `splits`) depends on its split key: the column that `split_key` names, else its column `split_key`, else its key.
"""

from __future__ import annotations

import decimal
import json
from collections.abc import Collection, Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from rftdata.config import TasksetConfig
from rftdata.config_errors import nearest
from rftdata.errors import TaskSourceError, ranges
from rftdata.limits import MAX_JSON_DEPTH, MAX_NAME_BYTES, is_too_deep
from rftdata.postgres.database import Database
from rftdata.postgres.values import storable
from rftdata.tasks.sources import source_rows, was_cut
from rftdata.tasks.splits import SplitCounts, Splitter, key_column, key_of_value

# Columns that a source probably means if the configured one is missing.
_USUAL_PROMPTS = ("question", "prompt", "problem", "instruction", "query", "input", "messages", "conversations", "text")
_USUAL_ANSWERS = ("answer", "solution", "target", "label", "output", "response", "completion", "final_answer")
# JSON lines may omit null columns, so this many rows are read before a column counts as missing.
_ROWS_TO_FIND_A_COLUMN = 64


@dataclass
class Repeats:
    """Rows that were left out because an earlier row has the same prompt but another answer.

    Attributes:
        rows: their number.
        example: the numbers of one of them and of the earlier row, and the prompt.
    """

    rows: int = 0
    example: tuple[int, int, str] = (0, 0, "")

    def sentence(self) -> str:
        """Return the message about them."""
        number, first, prompt = self.example
        return (
            f"rows left out because an earlier row has the same prompt but another answer: {self.rows:,}, such as row {number}, "
            f"which repeats row {first} ({prompt[:60]!r}); rows with different task_keys would stay"
        )


@dataclass
class Reading:
    """Findings about a source that was read, in addition to its tasks.

    Attributes:
        repeats: rows that were left out.
        splits: number of tasks in each split, if the taskset uses one.
        was_cut: whether reading ended before the source because time was up (`sources.reading_for`); the rest may contain what was
            not found.
    """

    repeats: Repeats = field(default_factory=Repeats)
    splits: SplitCounts = field(default_factory=SplitCounts)
    was_cut: bool = False

    def sentences(self) -> list[str]:
        """Return messages about it."""
        found = [self.splits.sentence(was_cut=self.was_cut)] if self.splits.taken else []
        return found + ([self.repeats.sentence()] if self.repeats.rows else [])


def read_tasks(
    config: TasksetConfig, base_dir: Path, database: Database | None = None, reading: Reading | None = None
) -> Generator[dict[str, Any], None, None]:
    """Yield the tasks of a source, split and limited, each once: row (its number), task_key, split_key, payload, features. One row is in memory at a time.

    Args:
        base_dir: folder from which relative paths in the source start.
        database: database for a `sql:` source without a URL.
        reading: counts rows that are left out, and tasks by split.

    Raises:
        TaskSourceError: the source cannot be read, a row is not a task, a named column is missing, or two rows with the same
            `task_key` differ.
    """
    reading = reading or Reading()
    seen, splitter = _Seen(config, reading.repeats), Splitter(config, reading.splits)
    named = _named_columns(config)
    for number, row in enumerate(source_rows(config, base_dir, database), start=1):
        try:
            task, is_named = _task(config, row, number)
        # Numbers of thousands of digits; objects of the source's own.
        except (ValueError, OverflowError, RecursionError) as error:
            raise TaskSourceError(
                f"row {number} of the taskset {config.name!r} cannot be stored: {error}",
                todo="correct or remove it in its source",
            ) from error
        for column in named:
            column.see(row)
        if config.split and splitter.split(task) != config.split:
            continue
        if not seen.is_new(task, number, is_named=is_named):
            continue
        yield task
        if config.limit is not None and len(seen) >= config.limit:
            break
    else:
        reading.was_cut = was_cut()
        reading.splits.is_whole = not reading.was_cut
    for column in named if not reading.was_cut else ():
        column.refuse_if_missing()


class _NamedColumn:
    """A column that the configuration names and that single rows may omit.

    Args:
        key: key in the taskset's configuration.
        usual: names that sources use for such a column.
    """

    def __init__(self, config: TasksetConfig, key: str, column: str, usual: Collection[str]) -> None:
        self._config, self._key, self._column, self._usual = config, key, column, usual
        self._num_rows, self._is_there = 0, False
        self._columns: set[str] = set()

    def see(self, row: Mapping[Any, Any]) -> None:
        """Look for the column in the next row.

        Raises:
            TaskSourceError: none of the first rows has it.
        """
        if self._is_there:
            return
        self._num_rows += 1
        self._columns.update(map(str, row))
        self._is_there = self._column in self._columns
        if self._num_rows >= _ROWS_TO_FIND_A_COLUMN:
            self.refuse_if_missing()

    def refuse_if_missing(self) -> None:
        """Refuse the source if none of the rows read so far has the column.

        Raises:
            TaskSourceError: there are rows, and none has it.
        """
        if self._is_there or not self._num_rows:
            return
        name = self._config.name
        prompts = {"question", "messages"} if self._config.prompt is None else {self._config.prompt}
        near = _nearest(self._column, self._columns - prompts, self._usual)
        raise TaskSourceError(
            f"the taskset {name!r} has no column {self._column!r} (rows {ranges(range(1, self._num_rows + 1))})",
            allowed=", ".join(sorted(self._columns)),
            todo=f"correct `{self._key}: {self._column}` in the taskset {name!r}, or leave it out" + _suggestion(near),
        )


def _named_columns(config: TasksetConfig) -> list[_NamedColumn]:
    """Return the named columns, other than the prompt, that the source must have."""
    found = [] if config.answer is None else [_NamedColumn(config, "answer", config.answer, _USUAL_ANSWERS)]
    if config.split and config.split_key is not None:
        found.append(_NamedColumn(config, "split_key", key_column(config.split_key), ()))
    return found


def _nearest(name: str, columns: Collection[str], usual: Collection[str]) -> str | None:
    """Return the column that was most likely meant: a similar name, a usual name, else the least different one."""
    candidates = sorted(set(columns) - {"task_key", "split_key", "features"})
    often = next((column for column in usual if column in candidates), None)
    return nearest(name, candidates) or often or nearest(name, candidates, cutoff=0.0)


def _suggestion(near: str | None) -> str:
    return f"; did you mean {near!r}?" if near else ""


class _Seen:
    """Keys of the rows so far. There may be millions, so a row is two numbers: a digest of its key, and one of its content with its place."""

    def __init__(self, config: TasksetConfig, repeats: Repeats) -> None:
        self._config, self._repeats = config, repeats
        self._rows: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def is_new(self, task: dict[str, Any], number: int, *, is_named: bool) -> bool:
        """Return whether a task is the first with its key.

        Raises:
            TaskSourceError: it has the `task_key` of an earlier row and different content.
        """
        payload = task["payload"]
        # Rows with one prompt may differ in metadata, but two answers to it contradict each other.
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
                f"rows {first} and {number} of the taskset {self._config.name!r} have the same task_key but differ",
                value=task["task_key"],
                todo="give every task a different task_key in the source, or remove the column",
            )
        self._repeats.rows += 1
        if self._repeats.rows == 1:
            prompt = payload["prompt"]
            self._repeats.example = (number, first, prompt if isinstance(prompt, str) else json.dumps(prompt))
        return False


def _task(config: TasksetConfig, row: Any, number: int) -> tuple[dict[str, Any], bool]:
    """Return a row as a task, and whether its key comes from the source."""
    if not isinstance(row, Mapping):
        raise TaskSourceError(
            f"row {number} of the taskset {config.name!r} is not a mapping of columns to values",
            value=row,
            todo="correct the source",
        )
    row = dict(row)
    if is_too_deep({"metadata": row}):  # as it is stored
        raise TaskSourceError(
            f"row {number} of the taskset {config.name!r} is nested too deeply",
            allowed=f"up to {MAX_JSON_DEPTH - 2} levels in a column",
            todo="correct or remove it in its source",
        )
    row = storable(row)
    column = _prompt_column(config, row)
    answer = config.answer or "answer"
    if column not in row:
        near = _nearest(column, set(row) - {answer}, _USUAL_PROMPTS)
        raise TaskSourceError(
            f"the taskset {config.name!r} has no column {column!r} (row {number})",
            allowed=", ".join(sorted(row)),
            todo=f"name the column with the prompt: `prompt: …` in the taskset {config.name!r}" + _suggestion(near),
        )
    prompt = _prompt(config, column, row[column], number)
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, default=_json_value)
    features = row.pop("features") if isinstance(row.get("features"), Mapping) else {}
    for name, value in features.items():
        if isinstance(value, int) and value.bit_length() > 1023:  # selectors compute with floats
            raise TaskSourceError(
                f"row {number} of the taskset {config.name!r} has a feature {name!r} of {value.bit_length():,} bits",
                allowed="numbers up to 1.7e308",
                todo="correct or remove it in its source",
            )
    rest = {k: v for k, v in row.items() if k not in (column, answer, "task_key", "split_key")}
    payload = {"prompt": prompt, "answer": _answer(row.get(answer)), "metadata": rest}
    task_key = _key_of_source(row, "task_key")
    if task_key is not None and len(task_key.encode()) > MAX_NAME_BYTES:
        raise TaskSourceError(
            f"row {number} of the taskset {config.name!r} has a task_key of {len(task_key):,} characters",
            value=f"{task_key[:60]}…",
            allowed=f"up to {MAX_NAME_BYTES:,} bytes",
            todo="give it a shorter one in its source, such as a digest of this one",
        )
    key = task_key or xxhash.xxh3_128_hexdigest(text.encode())
    return {
        "row": number,
        "task_key": key,
        "split_key": _split_key(config, row) or key,
        "payload": _as_json(payload),
        "features": _as_json(features) if features else {},
    }, task_key is not None


def _prompt_column(config: TasksetConfig, row: Mapping[str, Any]) -> str:
    if config.prompt is not None:
        return config.prompt
    return "messages" if "messages" in row and "question" not in row else "question"


def _split_key(config: TasksetConfig, row: dict[str, Any]) -> str | None:
    if config.split_key is None:
        return _key_of_source(row, "split_key")
    value = row.get(key_column(config.split_key))
    return None if value is None or value == "" else key_of_value(config.split_key, value)


def _prompt(config: TasksetConfig, column: str, prompt: Any, number: int) -> str | list[Any]:
    """Return a row's prompt after checking it."""
    if not isinstance(prompt, str | list) or not prompt or (isinstance(prompt, str) and not prompt.strip()):
        what = f"has no prompt in its column {column!r}"
    elif isinstance(prompt, list) and not all(map(_is_message, prompt)):
        what = f"has a list in its column {column!r} that is not a chat"
    else:
        return prompt
    raise TaskSourceError(
        f"row {number} of the taskset {config.name!r} {what}",
        value=prompt,
        allowed="a text, or a list of chat messages with role and content",
        todo="correct or remove the row in its source",
    )


def _is_message(turn: Any) -> bool:
    return isinstance(turn, Mapping) and isinstance(turn.get("role"), str) and "content" in turn


def _answer(value: Any) -> str | None:
    """Return the answer as a text; mappings, lists and truth values as JSON."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool | dict | list):
        return json.dumps(value, default=_json_value, ensure_ascii=False)
    return str(value)


def _key_of_source(row: dict[str, Any], column: str) -> str | None:
    """Return a key from the source, if any; 0 is a key."""
    value = row.get(column)
    return None if value is None or value == "" else str(value)


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value, default=_json_value))


def _json_value(value: Any) -> Any:
    """Convert a value that JSON does not support: decimals to numbers, everything else to text."""
    if isinstance(value, decimal.Decimal):
        return float(value) if value.is_finite() else None
    return str(value)
