"""Which of three disjoint splits a task belongs to: train, validation or test.

The hash of a task's split key decides, and nothing else, so a task keeps its split when its source grows or shrinks, and in every
taskset with the same shares. The price is chance: of 1,000 tasks with a share of 0.1 some 100 ± 20 lie in it, of 100 some 10 ± 6.
Split keys with many tasks each widen that.
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
    """Tasks of a source by split, counted while it is read.

    Attributes:
        taken: the split that the taskset takes; None where it takes all.
        num_tasks: distinct tasks by split.
        is_whole: whether the source was read to its end; a limit ends the reading earlier.
    """

    taken: str | None = None
    num_tasks: Counter[str] = field(default_factory=Counter)
    is_whole: bool = False

    def sentence(self, *, was_cut: bool = False) -> str:
        """For people; `was_cut`: the time was over before the source ended, rather than its limit reached."""
        counts = ", ".join(f"{split} {self.num_tasks[split]:,}" for split in SPLITS)
        read = "tasks read up to its limit, by split"
        if was_cut or self.is_whole:
            read = "tasks read in time, by split" if was_cut else "tasks of its source by split"
        return f"{read}: {counts}; it takes {self.taken}"


class Splitter:
    """Sorts the tasks of one source into splits.

    One text never lies in two splits, whatever split keys its rows have: its first row decides.
    """

    def __init__(self, config: TasksetConfig, counts: SplitCounts) -> None:
        self._shares, self._counts = config.split_shares, counts
        self._split_of_text: dict[int, str] = {}
        self._keys: set[int] = set()
        counts.taken = config.split

    def split(self, task: Mapping[str, Any]) -> str:
        """The split of a task of `read_tasks`, which is counted once per key."""
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
    """train, validation or test, by the hash of a key alone."""
    place = xxhash.xxh3_64_intdigest(split_key.encode()) / 2**64
    for split, share in zip(SPLITS, shares, strict=True):
        if place < share:
            return split
        place -= share
    return SPLITS[-1]


def key_column(setting: str) -> str:
    """The column that a taskset's `split_key` names, with or without `numbers:` before it."""
    return setting.removeprefix(_NUMBERS)


def key_of_value(setting: str, value: Any) -> str:
    """The split key of a task whose column, named by a taskset's `split_key`, has this value."""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
    return numbers_key(text) if setting.startswith(_NUMBERS) else text


def numbers_key(text: str) -> str:
    """Sorted numbers of a text, so that `3 + 14` and `14 - 3` stay together; the text without case and space when it has none."""
    numbers = re.findall(r"\d+", text)
    return ",".join(sorted(numbers, key=lambda n: (len(n), n))) if numbers else "".join(text.casefold().split())
