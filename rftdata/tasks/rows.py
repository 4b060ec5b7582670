"""Rows of a source become tasks: prompt, answer and metadata, a stable key, and one of three disjoint splits.

A source yields mappings. `prompt` and `answer` name the columns that matter; everything else a row has is kept under
`metadata` for the reward, but `features`, where it is a mapping: numbers and tags for selectors and scores. A row's key is its
`task_key` column, else a digest of its prompt, so loading again finds the same rows and repeated questions count once. Rows that a
source gives one `task_key` must say the same.

A column that the configuration names must exist. Rows may leave out the answer, since JSON lines often leave out what is null;
a named column that no early row has is a mistake, and refused.

A task's split (see `splits`) follows from its split key: the column that `split_key` names, else its column `split_key`, else its key.
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
from rftdata.postgres.database import Database
from rftdata.postgres.values import storable
from rftdata.tasks.sources import source_rows, was_cut
from rftdata.tasks.splits import SplitCounts, Splitter, key_column, key_of_value

# Columns that a source is likely to mean where the one that is asked for is missing.
_USUAL_PROMPTS = ("question", "prompt", "problem", "instruction", "query", "input", "messages", "conversations", "text")
_USUAL_ANSWERS = ("answer", "solution", "target", "label", "output", "response", "completion", "final_answer")
# JSON lines may leave a column out where it is null: so many rows are looked at before it counts as missing.
_ROWS_TO_FIND_A_COLUMN = 64
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


@dataclass
class Reading:
    """What reading a source found, beside its tasks.

    Attributes:
        repeats: rows that were left out.
        splits: how many tasks each split has, where the taskset takes one.
        was_cut: whether the reading ended before the source did because its time was over (`sources.reading_for`); what was not seen
            may be in the rest.
    """

    repeats: Repeats = field(default_factory=Repeats)
    splits: SplitCounts = field(default_factory=SplitCounts)
    was_cut: bool = False

    def sentences(self) -> list[str]:
        """What a person should know of it."""
        found = [self.splits.sentence(was_cut=self.was_cut)] if self.splits.taken else []
        return found + ([self.repeats.sentence()] if self.repeats.rows else [])


def read_tasks(
    config: TasksetConfig, base_dir: Path, database: Database | None = None, reading: Reading | None = None
) -> Generator[dict[str, Any], None, None]:
    """Tasks of a source, split and limited, each once: row (its number), task_key, split_key, payload, features. One row is held at a time.

    Args:
        base_dir: folder that relative paths in the source start from.
        database: what a `sql:` source without a URL asks.
        reading: counts rows that are left out, and tasks by split.

    Raises:
        TaskSourceError: the source cannot be read, a row of it is no task, it lacks a column that is named, or two rows of one
            `task_key` differ.
    """
    reading = reading or Reading()
    seen, splitter = _Seen(config, reading.repeats), Splitter(config, reading.splits)
    named = _named_columns(config)
    for number, row in enumerate(source_rows(config, base_dir, database), start=1):
        try:
            task, is_named = _task(config, row, number)
        except RecursionError:
            raise TaskSourceError(
                f"row {number} of the taskset {config.name!r} is nested too deeply",
                todo="correct or remove it in its source",
            ) from None
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
    """A column that the configuration names and that single rows may leave out.

    Args:
        key: of the taskset's configuration.
        usual: names that sources use for such a column.
    """

    def __init__(self, config: TasksetConfig, key: str, column: str, usual: Collection[str]) -> None:
        self._config, self._key, self._column, self._usual = config, key, column, usual
        self._num_rows, self._is_there = 0, False
        self._columns: set[str] = set()

    def see(self, row: Mapping[Any, Any]) -> None:
        """Look for it in the next row.

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
        """Refuse the source if none of its rows so far has the column.

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
            todo=f"correct `{self._key}: {self._column}` in the taskset {name!r}, or leave it out" + _meant(near),
        )


def _named_columns(config: TasksetConfig) -> list[_NamedColumn]:
    """Columns for other things than the prompt, which every row must have."""
    found = [] if config.answer is None else [_NamedColumn(config, "answer", config.answer, _USUAL_ANSWERS)]
    if config.split and config.split_key is not None:
        found.append(_NamedColumn(config, "split_key", key_column(config.split_key), ()))
    return found


def _nearest(name: str, columns: Collection[str], usual: Collection[str]) -> str | None:
    """The column that is most likely meant: one that is written alike, one that is often called so, else the least unlike."""
    candidates = sorted(set(columns) - {"task_key", "split_key", "features"})
    often = next((column for column in usual if column in candidates), None)
    return nearest(name, candidates) or often or nearest(name, candidates, cutoff=0.0)


def _meant(near: str | None) -> str:
    return f"; did you mean {near!r}?" if near else ""


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


def _task(config: TasksetConfig, row: Any, number: int) -> tuple[dict[str, Any], bool]:
    """A row as a task, and whether its key is one that the source gave it."""
    if not isinstance(row, Mapping):
        raise TaskSourceError(
            f"row {number} of the taskset {config.name!r} is no mapping of columns to values",
            value=row,
            todo="mend its source",
        )
    row = storable(dict(row))
    column = _prompt_column(config, row)
    answer = config.answer or "answer"
    if column not in row:
        near = _nearest(column, set(row) - {answer}, _USUAL_PROMPTS)
        raise TaskSourceError(
            f"the taskset {config.name!r} has no column {column!r} (row {number})", allowed=", ".join(sorted(row)),
            todo=f"name the column with the prompt: `prompt: …` in the taskset {config.name!r}" + _meant(near),
        )  # fmt: skip
    prompt = _prompt(config, column, row[column], number)
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, default=_plain)
    features = row.pop("features") if isinstance(row.get("features"), Mapping) else {}
    rest = {k: v for k, v in row.items() if k not in (column, answer, "task_key", "split_key")}
    payload = {"prompt": prompt, "answer": _answer(row.get(answer)), "metadata": rest}
    task_key = _given(row, "task_key")
    if task_key is not None and len(task_key.encode()) > _MAX_KEY_BYTES:
        raise TaskSourceError(
            f"row {number} of the taskset {config.name!r} has a task_key of {len(task_key):,} characters", value=f"{task_key[:60]}…",
            allowed=f"up to {_MAX_KEY_BYTES:,} bytes", todo="give it a shorter one in its source, such as a digest of this one",
        )  # fmt: skip
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
        return _given(row, "split_key")
    value = row.get(key_column(config.split_key))
    return None if value is None or value == "" else key_of_value(config.split_key, value)


def _prompt(config: TasksetConfig, column: str, prompt: Any, number: int) -> str | list[Any]:
    """Of a row, checked."""
    if not isinstance(prompt, str | list) or not prompt or (isinstance(prompt, str) and not prompt.strip()):
        what = f"has no prompt in its column {column!r}"
    elif isinstance(prompt, list) and not all(map(_is_message, prompt)):
        what = f"has a list in its column {column!r} that is no chat"
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
