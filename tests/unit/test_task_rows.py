"""Columns that a taskset names, and its splits: what is missing is refused, what is there is counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rftdata.config import TasksetConfig
from rftdata.errors import TaskSourceError
from rftdata.tasks import read_tasks
from rftdata.tasks.rows import Reading

SHARES = (0.8, 0.1, 0.1)


def tasks(
    folder: Path, rows: list[dict[str, Any]], reading: Reading | None = None, **config: Any
) -> list[dict[str, Any]]:
    (folder / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = TasksetConfig.model_validate({"name": "t", "source": "t.jsonl", **config})
    return list(read_tasks(found, folder, reading=reading))


def answers(found: list[dict[str, Any]]) -> list[str | None]:
    return [task["payload"]["answer"] for task in found]


@pytest.mark.parametrize("rows", [1, 5, 200])
def test_a_named_answer_column_that_does_not_exist_is_refused_with_the_nearest(tmp_path: Path, rows: int) -> None:
    last = min(rows, 64)
    with pytest.raises(
        TaskSourceError,
        match=rf"'t' has no column 'solution' \(rows 1{f'-{last}' if last > 1 else ''}\); allowed: answer, level, question; "
        r"correct `answer: solution` .*or leave it out; did you mean 'answer'\?$",
    ):
        tasks(
            tmp_path,
            [{"question": f"{i}?", "answer": "1", "level": 2} for i in range(rows)],
            answer="solution",
            limit=100,
        )


def test_the_default_answer_column_may_be_missing(tmp_path: Path) -> None:
    assert answers(tasks(tmp_path, [{"question": "a"}, {"question": "b", "answer": 3}])) == [None, "3"]


def test_a_named_answer_column_may_be_left_out_of_single_rows(tmp_path: Path) -> None:
    rows = [{"question": "a"}, {"question": "b", "target": "1"}, {"question": "c", "target": None}]
    assert answers(tasks(tmp_path, rows, answer="target")) == [None, "1", None]


@pytest.mark.parametrize(
    ("columns", "config", "near"),
    [
        ({"quest": "a", "answer": "b"}, {}, "quest"),
        ({"level": 1, "problem": "a", "answer": "b"}, {}, "problem"),
        ({"x": 1, "prompts": "a"}, {"prompt": "prompt"}, "prompts"),
    ],
)
def test_a_prompt_column_that_does_not_exist_is_refused_with_the_nearest(
    tmp_path: Path, columns: dict[str, Any], config: dict[str, str], near: str
) -> None:
    with pytest.raises(TaskSourceError, match=rf"no column .*`prompt: …` in the taskset 't'; did you mean '{near}'\?$"):
        tasks(tmp_path, [columns], **config)


def test_a_chat_file_needs_no_setting(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(TaskSourceError, match=r"no column 'solution' .*allowed: messages; .*or leave it out\.$"):
        tasks(tmp_path, [{"messages": chat}], answer="solution")
    (task,) = tasks(tmp_path, [{"messages": chat, "id": 7}])
    assert task["payload"] == {"prompt": chat, "answer": None, "metadata": {"id": 7}}


ROWS = [{"question": f"Train {n % 7} leaves at {n % 5}: {'abcdefghij'[n % 10]}{n // 70}?"} for n in range(420)]


def test_tasks_are_split_by_their_keys_and_counted(tmp_path: Path) -> None:
    """Few numbers, many texts: split keys made of numbers would give shares far from the asked ones."""
    sizes, counted = {}, []
    for split in ("train", "validation", "test"):
        reading = Reading()
        sizes[split] = len(tasks(tmp_path, ROWS, reading, split=split, split_shares=SHARES))
        counted.append(dict(reading.splits.num_tasks))
        assert reading.sentences() == [
            "tasks of the source by split: train {train}, validation {validation}, test {test}; it uses {split}".format(
                **counted[-1], split=split
            )
        ]
    assert counted == [sizes] * 3 and sum(sizes.values()) == len({row["question"] for row in ROWS})
    for split, share in zip(sizes, SHARES, strict=True):
        deviation = (share * (1 - share) * len(ROWS)) ** 0.5
        assert abs(sizes[split] - share * len(ROWS)) < 3 * deviation


def test_a_task_keeps_its_split_when_the_source_grows(tmp_path: Path) -> None:
    def prompts(rows: list[dict[str, Any]]) -> set[str]:
        return {task["payload"]["prompt"] for task in tasks(tmp_path, rows, split="test")}

    some = prompts(ROWS[100:300])
    assert some and some == prompts(ROWS) & {row["question"] for row in ROWS[100:300]}


def test_a_column_may_name_rows_that_stay_together(tmp_path: Path) -> None:
    rows = [{"question": f"q{n}", "book": f"b{n % 40}", "task_key": n} for n in range(400)]
    books = [
        {task["payload"]["metadata"]["book"] for task in tasks(tmp_path, rows, split=split, split_key="book")}
        for split in ("train", "validation", "test")
    ]
    assert sum(map(len, books)) == len(set.union(*books)) == 40
    with pytest.raises(TaskSourceError, match=r"no column 'bock' .*correct `split_key: bock`.*did you mean 'book'"):
        tasks(tmp_path, rows, split="train", split_key="bock")


def test_the_numbers_of_a_column_may_name_rows_that_stay_together(tmp_path: Path) -> None:
    rows = [{"question": f"{a} + {b} ="} for a in range(20) for b in range(20)]
    numbers = [
        {
            tuple(sorted(task["payload"]["prompt"].split()[:3:2]))
            for task in tasks(tmp_path, rows, split=split, split_key="numbers:question")
        }
        for split in ("train", "validation", "test")
    ]
    assert all(numbers) and sum(map(len, numbers)) == len(set.union(*numbers)) == 210


def test_what_a_limit_left_unread_is_not_counted(tmp_path: Path) -> None:
    reading = Reading()
    assert len(tasks(tmp_path, ROWS, reading, split="validation", limit=3)) == 3
    assert reading.splits.num_tasks["validation"] == 3
    assert reading.splits.sentence().startswith("tasks read up to the limit, by split: train ")
