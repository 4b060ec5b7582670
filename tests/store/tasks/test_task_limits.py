"""Sources that grow at their head, shrink, or repeat keys: the limit is kept, and rows left out or removed are reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rftcore.resolved import ResolvedRun
from rftcore.task_pipeline.pipeline import load_tasks
from rftdata import Buffer
from rftdata.config import TasksetConfig
from rftdata.errors import TaskSourceError
from rftdata.tasks import load_taskset, read_tasks
from tests.store.tasks.test_task_pipeline import configuration, write

OLD = [{"question": f"q{i}"} for i in range(20)]
NEW = [{"question": f"new{i}"} for i in range(10)]
GONE = "SELECT payload ->> 'prompt' AS p FROM rft.task WHERE left_source_at IS NOT NULL ORDER BY task_id"
TWICE = """
import pyarrow as pa
from operators.base import CreatedTask, Operator, StageOutcome

class Twice(Operator):
    "Another task of every task."
    reads = frozenset({"prompt", "task_key"})
    rowwise = True

    def apply(self, table):
        made = [
            CreatedTask("", row["task_key"] + "/again", {"prompt": "again: " + row["prompt"], "answer": None}, row["experience_id"])
            for row in table.to_pylist()
        ]
        return StageOutcome(pa.nulls(table.num_rows, pa.string()), created=made)
"""
EXCLUDE = "UPDATE rft.task SET status = 'excluded' WHERE taskset = 'sums' AND left_source_at IS NOT NULL"


def load(buffer: Buffer, folder: Path, rows: list[dict[str, Any]], limit: int | None = None) -> int:
    write(folder, rows)
    return load_taskset(buffer.database, TasksetConfig(name="sums", source="sums.jsonl", limit=limit), folder)


def prompts(
    buffer: Buffer, query: str = "SELECT payload ->> 'prompt' AS p FROM rft.task ORDER BY task_id"
) -> list[str]:
    found: list[str] = buffer.sql(query)["p"].to_pylist()
    return found


def test_a_limit_is_kept_whatever_comes_at_the_head_of_the_source(
    buffer: Buffer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load(buffer, tmp_path, OLD[:8], limit=10) == 8
    assert capsys.readouterr().err == ""
    assert load(buffer, tmp_path, [*NEW, *OLD], limit=10) == 10
    assert prompts(buffer) == [f"q{i}" for i in range(8)] + ["new0", "new1"]
    said = capsys.readouterr().err
    assert "tasks: sums: with the stored tasks the limit of 10 is reached" in said
    assert said.endswith("left out: 8\n") and said.count("\n") == 1
    assert load(buffer, tmp_path, OLD[::-1], limit=10) == 10
    assert prompts(buffer, GONE) == []  # rows beyond the limit were not read: so they do not count as removed


def test_tasks_that_left_their_source_stay_and_are_said_to(
    buffer: Buffer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load(buffer, tmp_path, OLD)
    assert load(buffer, tmp_path, OLD[:5]) == 20
    said = capsys.readouterr().err
    assert "tasks: sums: tasks that are not in the source (any more): 15; they stay" in said and EXCLUDE in said
    assert prompts(buffer, GONE) == [f"q{i}" for i in range(5, 20)]
    load(buffer, tmp_path, OLD[:7])
    assert prompts(buffer, GONE) == [f"q{i}" for i in range(7, 20)]  # two came back
    buffer.sql(EXCLUDE)
    capsys.readouterr()
    load(buffer, tmp_path, OLD[:6])
    assert "(any more): 1;" in capsys.readouterr().err  # an excluded task does not count


def test_a_set_that_shrank_below_its_limit_is_known_to_have(
    buffer: Buffer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load(buffer, tmp_path, OLD, limit=10)
    assert load(buffer, tmp_path, [*OLD[:4], *NEW[:2]], limit=10) == 10
    said = capsys.readouterr().err
    assert "left out: 2\n" in said and "(any more): 6;" in said
    assert prompts(buffer, GONE) == [f"q{i}" for i in range(4, 10)]


def test_tasks_that_a_stage_made_are_neither_removed_nor_counted(
    buffer: Buffer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, OLD[:2])
    (tmp_path / "twice.py").write_text(TWICE)
    sets = [{"name": "sums", "source": "sums.jsonl", "limit": 3}]
    config = configuration(tmp_path, ["./twice.py:Twice"], tasks=sets)
    load_tasks(ResolvedRun(config), buffer)
    assert len(prompts(buffer)) == 4
    write(tmp_path, OLD[:4])
    capsys.readouterr()
    load_tasks(ResolvedRun(config), buffer)
    assert sorted(prompts(buffer)) == sorted([*(f"q{i}" for i in range(3)), *(f"again: q{i}" for i in range(3))])
    said = capsys.readouterr().err
    assert prompts(buffer, GONE) == [] and "any more" not in said and "left out" not in said


def test_two_rows_of_one_key_that_differ_are_refused(buffer: Buffer, tmp_path: Path) -> None:
    rows = [{"task_key": key, "question": q} for key, q in (("b", "q0"), ("a", "q1"), ("a", "q1"), ("a", "q2"))]
    with pytest.raises(
        TaskSourceError, match=r"rows 2 and 4 of the taskset 'sums' have the same task_key but differ.*'a'"
    ):
        load(buffer, tmp_path, rows)
    assert prompts(buffer) == []
    assert load(buffer, tmp_path, rows[:3]) == 2  # the same row twice is one task


def test_rows_of_one_prompt_are_one_task_and_those_with_another_answer_are_reported(
    buffer: Buffer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same = [{"question": "q", "answer": "1", "from": "a"}, {"answer": "1", "from": "a", "question": "q"}]
    assert load(buffer, tmp_path, same) == 1
    assert capsys.readouterr().err == ""
    others = [{"question": "q", "answer": "2", "from": "a"}, {"question": "q", "answer": "1", "from": "b"}]
    assert load(buffer, tmp_path, [*same, *others]) == 1
    said = capsys.readouterr().err
    assert "but another answer: 1, such as row 3, which repeats row 1 ('q')" in said and said.count("\n") == 1
    assert buffer.sql("SELECT payload ->> 'answer' AS p FROM rft.task")["p"].to_pylist() == ["1"]


def test_a_key_of_zero_is_a_key(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"question": f"q{i}", "task_key": i, "split_key": 0} for i in range(30)]
    write(tmp_path, [*rows, {"question": "x", "task_key": "", "split_key": None}])
    *named, other = read_tasks(TasksetConfig(name="t", source="sums.jsonl"), tmp_path)
    assert [(task["task_key"], task["split_key"]) for task in named] == [(str(i), "0") for i in range(30)]
    assert len(other["task_key"]) == 32 and other["split_key"] == other["task_key"]
