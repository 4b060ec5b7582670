"""Assignment of tasks to three disjoint splits: train, validation and test.

Only the hash of a task's split key decides. A task therefore keeps its split when its source grows or shrinks, and in every
taskset with the same shares. In return, sizes vary: of 1,000 tasks, a share of 0.1 contains about 100 ± 20, of 100 tasks about 10 ± 6.
Split keys shared by many tasks increase the variation.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash

from rftdata.config import TasksetConfig

SPLITS = ("train", "validation", "test")
_NUMBERS = "numbers:"


@dataclass
class SplitCounts:
    """Number of tasks of a source by split, counted while it is read.

    Attributes:
        taken: the split that the taskset uses; None if it uses all.
        num_tasks: distinct tasks by split.
        is_whole: whether the source was read to its end; a limit ends reading earlier.
    """

    taken: str | None = None
    num_tasks: Counter[str] = field(default_factory=Counter)
    is_whole: bool = False

    def sentence(self, *, was_cut: bool = False) -> str:
        """Return a message; `was_cut`: time was up before the source ended, rather than the limit reached."""
        counts = ", ".join(f"{split} {self.num_tasks[split]:,}" for split in SPLITS)
        read = "tasks read up to the limit, by split"
        if was_cut or self.is_whole:
            read = "tasks read in time, by split" if was_cut else "tasks of the source by split"
        return f"{read}: {counts}; it uses {self.taken}"


class Splitter:
    """Assigns the tasks of one source to splits.

    A text is never in two splits, whatever the split keys of its rows: its first row decides.
    """

    def __init__(self, config: TasksetConfig, counts: SplitCounts) -> None:
        self._shares, self._counts = config.split_shares, counts
        self._split_of_text: dict[int, str] = {}
        self._keys: set[int] = set()
        counts.taken = config.split

    def split(self, task: Mapping[str, Any]) -> str:
        """Return the split of a task of `read_tasks`, and count the task once per key."""
        text = "".join(json.dumps(task["payload"]["prompt"]).casefold().split())
        split = self._split_of_text.setdefault(
            xxhash.xxh3_64_intdigest(text.encode()), split_of(task["split_key"], self._shares)
        )
        key = xxhash.xxh3_64_intdigest(task["task_key"].encode())
        if key not in self._keys:
            self._keys.add(key)
            self._counts.num_tasks[split] += 1
        return split


def split_of(split_key: str, shares: tuple[float, float, float]) -> str:
    """Return train, validation or test, by the hash of a key alone."""
    place = xxhash.xxh3_64_intdigest(split_key.encode()) / 2**64
    for split, share in zip(SPLITS, shares, strict=True):
        if place < share:
            return split
        place -= share
    return SPLITS[-1]


def key_column(setting: str) -> str:
    """Return the column that a taskset's `split_key` names, with or without the prefix `numbers:`."""
    return setting.removeprefix(_NUMBERS)


def key_of_value(setting: str, value: Any) -> str:
    """Return the split key for a value of the column that a taskset's `split_key` names."""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
    return numbers_key(text) if setting.startswith(_NUMBERS) else text


def numbers_key(text: str) -> str:
    """Return the sorted numbers of a text, so that `3 + 14` and `14 - 3` match; without numbers, the text without case and space."""
    numbers = re.findall(r"\d+", text)
    return ",".join(sorted(numbers, key=lambda n: (len(n), n))) if numbers else "".join(text.casefold().split())
