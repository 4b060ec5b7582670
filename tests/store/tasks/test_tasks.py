"""Task sources: files, generators, reasoning_gym; loaded once with stable keys; splits that share nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rftdata import Buffer
from rftdata.config import TasksetConfig
from rftdata.errors import PluginError, TaskSourceError
from rftdata.tasks import list_tasksets, load_taskset, numbers_key, read_tasks, split_of
from tests.support.stored_run import StoredRun

ROWS = [{"question": f"What is {i} + {i + 1}?", "answer": f"{2 * i + 1}.0", "level": i % 3} for i in range(30)]
GENERATOR = """
def sums(count, level=1):
    for i in range(count):
        yield {"question": f"{i} + {level}", "answer": i + level, "task_key": f"sum-{i}", "features": {"level": level}}

def broken():
    yield {"question": "1"}
    raise RuntimeError("out of sums")

def odd():
    yield "just text"

def huge():
    yield {"question": "1", "answer": 10**5000}
"""


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    if path.suffix == ".jsonl":
        path.write_text("\n\n".join(json.dumps(row) for row in rows) + "\n")
    elif path.suffix == ".csv":
        lines = [",".join(rows[0])] + [",".join(str(value) for value in row.values()) for row in rows]
        path.write_text("\ufeff" + "\n".join(lines) + "\n")
    else:
        pa.parquet.write_table(pa.Table.from_pylist(rows), path)


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_a_file_becomes_tasks_with_prompt_answer_and_everything_else(
    buffer: Buffer, tmp_path: Path, suffix: str
) -> None:
    write(tmp_path / f"sums{suffix}", ROWS)
    assert load_taskset(buffer.database, TasksetConfig(name="sums", source=f"sums{suffix}"), tmp_path) == 30
    payload = buffer.sql("SELECT payload FROM rft.task ORDER BY task_id LIMIT 1 OFFSET 4")["payload"].to_pylist()[0]
    level: object = "1" if suffix == ".csv" else 1
    assert payload == {"prompt": "What is 4 + 5?", "answer": "9.0", "metadata": {"level": level}}
    (taskset,) = list_tasksets(buffer.database)
    assert (taskset["taskset"], taskset["source"], taskset["num_tasks"]) == ("sums", f"sums{suffix}", 30)


def test_a_generator_of_ones_own_gets_its_arguments_and_keys(buffer: Buffer, tmp_path: Path) -> None:
    (tmp_path / "gen.py").write_text(GENERATOR)
    config = TasksetConfig(name="own", source="./gen.py:sums", args={"count": 5, "level": 3})
    assert load_taskset(buffer.database, config, tmp_path) == 5
    row = buffer.sql(
        "SELECT task_key, payload ->> 'answer' AS answer, features FROM rft.task ORDER BY task_id"
    ).to_pylist()[2]
    assert row == {"task_key": "sum-2", "answer": "5", "features": {"level": 3}}


def test_reasoning_gym_gives_questions_answers_and_metadata(buffer: Buffer, tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    config = TasksetConfig(name="rg", source="reasoning_gym:chain_sum", args={"size": 20, "seed": 3}, limit=10)
    assert load_taskset(buffer.database, config, tmp_path) == 10
    payload = buffer.sql("SELECT payload FROM rft.task ORDER BY task_id LIMIT 1")["payload"].to_pylist()[0]
    assert (
        payload["metadata"]["generator"] == "chain_sum"
        and payload["answer"]
        and "source_dataset" in payload["metadata"]
    )


def test_other_columns_may_hold_prompt_and_answer(tmp_path: Path) -> None:
    write(tmp_path / "t.jsonl", [{"q": "a?", "a": None}, {"q": [{"role": "user", "content": "b?"}]}])
    first, second = read_tasks(TasksetConfig(name="t", source="t.jsonl", prompt="q", answer="a"), tmp_path)
    assert first["payload"] == {"prompt": "a?", "answer": None, "metadata": {}}
    assert second["payload"]["prompt"][0]["content"] == "b?"


def test_loading_again_finds_the_same_rows_and_a_longer_file_adds_to_them(buffer: Buffer, tmp_path: Path) -> None:
    config = TasksetConfig(name="sums", source="sums.jsonl")
    write(tmp_path / "sums.jsonl", ROWS[:10] + ROWS[:5])
    assert load_taskset(buffer.database, config, tmp_path) == 10
    before = buffer.sql("SELECT task_id, task_key FROM rft.task ORDER BY 1").to_pylist()
    assert load_taskset(buffer.database, config, tmp_path) == 10
    write(tmp_path / "sums.jsonl", ROWS[5:15])
    assert load_taskset(buffer.database, config, tmp_path) == 15
    assert buffer.sql("SELECT task_id, task_key FROM rft.task ORDER BY 1").to_pylist()[:10] == before


@pytest.mark.parametrize("shares", [(0.8, 0.1, 0.1), (0.4, 0.3, 0.3)])
def test_splits_share_neither_a_split_key_nor_a_text(tmp_path: Path, shares: tuple[float, float, float]) -> None:
    pytest.importorskip("reasoning_gym")
    args = {"size": 600, "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
    splits = {
        split: list(
            read_tasks(
                TasksetConfig(
                    name=split, source="reasoning_gym:chain_sum", args=args, split=split, split_shares=shares
                ),
                tmp_path,
            )
        )
        for split in ("train", "validation", "test")
    }
    for key in ("split_key", "task_key"):
        sets = [{task[key] for task in tasks} for tasks in splits.values()]
        assert all(sets)
        assert sum(len(s) for s in sets) == len(set.union(*sets))
    texts = [{"".join(task["payload"]["prompt"].casefold().split()) for task in tasks} for tasks in splits.values()]
    assert sum(len(s) for s in texts) == len(set.union(*texts))
    total = sum(len(tasks) for tasks in splits.values())
    assert abs(len(splits["train"]) / total - shares[0]) < 0.08


def test_one_text_lies_in_one_split_even_when_its_rows_name_different_split_keys(tmp_path: Path) -> None:
    write(
        tmp_path / "t.jsonl",
        [{"question": f"Say  HI {i % 7}" if i % 2 else f"say hi {i % 7}", "split_key": str(i)} for i in range(200)],
    )
    found = {}
    for split in ("train", "validation", "test"):
        config = TasksetConfig.model_validate(
            {"name": "t", "source": "t.jsonl", "split": split, "split_shares": (0.4, 0.3, 0.3)}
        )
        found[split] = {"".join(task["payload"]["prompt"].casefold().split()) for task in read_tasks(config, tmp_path)}
    assert sum(map(len, found.values())) == len(set.union(*found.values())) == 7


@settings(max_examples=200, deadline=None)
@given(key=st.text(max_size=20), a=st.floats(0, 1), b=st.floats(0, 1))
def test_every_key_lies_in_exactly_one_split(key: str, a: float, b: float) -> None:
    low, high = sorted((a, b))
    shares = (low, high - low, 1 - high)
    assert split_of(key, shares) == split_of(key, shares)
    assert split_of(key, (1.0, 0.0, 0.0)) == "train" and split_of(key, (0.0, 0.0, 1.0)) == "test"


def test_the_same_numbers_in_another_order_stay_together() -> None:
    assert numbers_key("3 + 14 =") == numbers_key("What is 14 - 3?") != numbers_key("3 + 41 =")
    assert numbers_key("Why  Not?") == numbers_key("why not?")


def broken_jsonl(path: Path) -> str:
    (path / "t.jsonl").write_text('{"question": "a"}\n{"question": \n')
    return "t.jsonl"


def not_an_object(path: Path) -> str:
    (path / "t.jsonl").write_text('{"question": "a"}\n[1, 2]\n')
    return "t.jsonl"


def not_utf8(path: Path) -> str:
    (path / "t.csv").write_bytes(b"question,answer\n\xff\xfe,1\n")
    return "t.csv"


def open_csv(path: Path) -> str:
    """The first question takes the other tasks into itself."""
    (path / "t.csv").write_text('question,answer\na,"b\nc,d\ne,f\n')
    return "t.csv"


def ragged_csv(path: Path) -> str:
    (path / "t.csv").write_text("question,answer\na,1\nb,2,3\n")
    return "t.csv"


def named_twice(path: Path) -> str:
    (path / "t.csv").write_text("question,answer,answer\na,1,2\n")
    return "t.csv"


def nested(depth: int) -> Callable[[Path], str]:
    def make(path: Path) -> str:
        (path / "t.jsonl").write_text(f'{{"question": "a"}}\n{{"question": "b", "x": {"[" * depth + "]" * depth}}}\n')
        return "t.jsonl"

    return make


def row(**columns: Any) -> Callable[[Path], str]:
    def make(path: Path) -> str:
        write(path / "t.jsonl", [columns])
        return "t.jsonl"

    return make


def not_parquet(path: Path) -> str:
    (path / "t.parquet").write_text("no parquet")
    return "t.parquet"


def wrong_column(path: Path) -> str:
    (path / "t.jsonl").write_text('{"prompt": "a", "target": "b"}\n')
    return "t.jsonl"


def no_rows(path: Path) -> str:
    (path / "t.jsonl").write_text("\n")
    return "t.jsonl"


def folder(path: Path) -> str:
    (path / "t.jsonl").mkdir()
    return "t.jsonl"


def generator(name: str) -> Callable[[Path], str]:
    def make(path: Path) -> str:
        (path / "gen.py").write_text(GENERATOR)
        return f"./gen.py:{name}"

    return make


BAD_SOURCES: list[tuple[Callable[[Path], str], str]] = [
    (broken_jsonl, "cannot be read: line 2 is not JSON"),
    (not_an_object, "row 2 of the taskset 't' is not a mapping"),
    (not_utf8, "cannot be read: 'utf-8' codec"),
    (ragged_csv, "line 3 does not have the 2 fields of the header"),
    (open_csv, "the row from line 2 on: unexpected end of data; a value in quotes ends with one"),
    (named_twice, "its header has the column 'answer' twice; give every column a different name"),
    (nested(100_000), "cannot be read: line 2 is nested too deeply"),
    (nested(299), "row 2 .*is nested too deeply; allowed: up to 298 levels"),
    (
        row(question="a", task_key="k" * 9000),
        "row 1 of the taskset 't' has a task_key of 9,000 characters.*allowed: up to 1,000 bytes; give it a shorter one",
    ),
    (
        row(question="a", features={"x": 10**400}),
        "row 1 of the taskset 't' has a feature 'x' of 1,329 bits; allowed: numbers up to 1.7e308",
    ),
    (generator("huge"), r"row 1 of the taskset 't' cannot be stored: Exceeds the limit"),
    (
        lambda path: "sql:select 'a' as question, ('1' || repeat('0', 6000))::jsonb as x",
        "a row of the query .* cannot be read: Exceeds the limit",
    ),
    (
        lambda path: "sql:select 'a' as question, 'infinity'::date as x",
        "a row of the query .* cannot be read: date too large.*cast it to text",
    ),
    (
        lambda path: "sql:select 'a' as question, (repeat('[', 3000) || repeat(']', 3000))::json as x",
        "a row of the query .* cannot be read|row 1 .* is nested too deeply",
    ),
    (
        row(question=["x"]),
        "row 1 of the taskset 't' has a list in its column 'question' that is not a chat.*role and content",
    ),
    (row(question=[{"role": "user", "content": "a"}, {"content": "b"}]), "that is not a chat"),
    (row(question=[]), "row 1 of the taskset 't' has no prompt in its column 'question'"),
    (not_parquet, "cannot be read"),
    (wrong_column, r"no column 'question' \(row 1\); allowed: prompt, target; name the column"),
    (no_rows, "has no task"),
    (folder, "is a folder"),
    (lambda path: "missing.jsonl", "does not exist .*missing.jsonl"),
    (
        lambda path: "reasoning_gym:chain_summ",
        r"no generator 'chain_summ'; allowed: the \d+ names in .*; did you mean 'chain_sum'",
    ),
    (lambda path: "somewhere", "unknown kind of source"),
    (generator("broken"), "raised RuntimeError: out of sums"),
    (generator("odd"), "row 1 of the taskset 't' is not a mapping"),
    (generator("sums"), "missing 1 required positional argument: 'count'"),
]


@pytest.mark.parametrize(("make", "message"), BAD_SOURCES, ids=[message[:30] for _, message in BAD_SOURCES])
def test_a_bad_source_is_a_clear_error_and_loads_nothing(
    buffer: Buffer, tmp_path: Path, make: Callable[[Path], str], message: str
) -> None:
    with pytest.raises(TaskSourceError, match=message):
        load_taskset(buffer.database, TasksetConfig(name="t", source=make(tmp_path)), tmp_path)
    assert buffer.sql("SELECT (SELECT count(*) FROM rft.task) + (SELECT count(*) FROM rft.taskset) AS n")[
        "n"
    ].to_pylist() == [0]


def test_a_function_that_is_not_there_is_named(tmp_path: Path, buffer: Buffer) -> None:
    (tmp_path / "gen.py").write_text(GENERATOR)
    with pytest.raises(PluginError, match="has no 'summs'"):
        load_taskset(buffer.database, TasksetConfig(name="t", source="./gen.py:summs"), tmp_path)


def answers(buffer: Buffer) -> list[str]:
    return buffer.sql("SELECT payload ->> 'answer' AS a FROM rft.task ORDER BY task_id")["a"].to_pylist()


CORRECTED = [{**ROWS[0], "answer": "one"}, *ROWS[1:3]]


def plan_a_group(buffer: Buffer) -> None:
    buffer.sql(
        "INSERT INTO rft.rollout_group (run_id, attempt_id, ordinal, task_id, explore_step, group_size)"
        " SELECT 1, 1, 0, max(task_id), 0, 2 FROM rft.task"
    )


def plan_an_evaluation(buffer: Buffer) -> None:
    run = StoredRun(buffer)
    run.attempt()
    buffer.sql(
        "INSERT INTO rft.evaluation (run_id, policy_version_id, trainer_step, purpose, taskset, decoding, uri, checksum)"
        " VALUES (%s, %s, 0, 'validation', 'sums', 'greedy', '/w', '0')",
        [run.run_id, run.policy(0)],
    )


def test_tasks_corrected_before_any_was_tried_are_replaced(buffer: Buffer, tmp_path: Path) -> None:
    config = TasksetConfig(name="sums", source="sums.jsonl")
    write(tmp_path / "sums.jsonl", ROWS[:3])
    load_taskset(buffer.database, config, tmp_path)
    write(tmp_path / "sums.jsonl", CORRECTED)
    assert load_taskset(buffer.database, config, tmp_path) == 3
    assert answers(buffer) == ["one", "3.0", "5.0"]


@pytest.mark.parametrize("use", [plan_a_group, plan_an_evaluation])
def test_tasks_corrected_after_some_were_tried_are_refused_with_an_example(
    buffer: Buffer, tmp_path: Path, use: Callable[[Buffer], None]
) -> None:
    config = TasksetConfig(name="sums", source="sums.jsonl")
    write(tmp_path / "sums.jsonl", ROWS[:3])
    load_taskset(buffer.database, config, tmp_path)
    use(buffer)
    write(tmp_path / "sums.jsonl", CORRECTED)
    with pytest.raises(
        TaskSourceError, match=r"1 of the tasks stored as 'sums' now differ.*was .*1\.0.*got .*one.*another name"
    ):
        load_taskset(buffer.database, config, tmp_path)
    assert answers(buffer) == ["1.0", "3.0", "5.0"]
    write(tmp_path / "sums.jsonl", ROWS[:4])  # more tasks are welcome
    assert load_taskset(buffer.database, config, tmp_path) == 4


def test_an_edited_generator_is_read_again_an_unchanged_one_is_not(buffer: Buffer, tmp_path: Path) -> None:
    (tmp_path / "gen.py").write_text(GENERATOR)
    config = TasksetConfig(name="own", source="./gen.py:sums", args={"count": 2})
    load_taskset(buffer.database, config, tmp_path)
    buffer.sql("DELETE FROM rft.task")
    assert load_taskset(buffer.database, config, tmp_path) == 2
    assert answers(buffer) == []
    (tmp_path / "gen.py").write_text(GENERATOR.replace("i + level,", "i - level,"))
    load_taskset(buffer.database, config, tmp_path)
    assert answers(buffer) == ["-1", "0"]


@pytest.mark.parametrize(
    "change",
    [{"source": "other.jsonl"}, {"limit": 5}, {"split": "test"}, {"prompt": "answer"}, {"answer": "level"}],
    ids=lambda change: next(iter(change)),
)
def test_another_source_under_the_same_name_is_refused(buffer: Buffer, tmp_path: Path, change: dict[str, Any]) -> None:
    write(tmp_path / "sums.jsonl", ROWS)
    write(tmp_path / "other.jsonl", ROWS)
    config = TasksetConfig(name="sums", source="sums.jsonl")
    load_taskset(buffer.database, config, tmp_path)
    with pytest.raises(TaskSourceError, match=r"already holds a taskset 'sums'.*give this one another name"):
        load_taskset(buffer.database, config.model_copy(update=change), tmp_path)


def test_a_refused_source_is_shown_by_what_differs(buffer: Buffer, tmp_path: Path) -> None:
    (tmp_path / "gen.py").write_text(GENERATOR)
    config = TasksetConfig(name="sums", source="./gen.py:sums", args={"count": 2, "level": 1}, split="train")
    load_taskset(buffer.database, config, tmp_path)
    changed = config.model_copy(
        update={"args": {"count": 3, "level": 1}, "split": None, "split_shares": (0.5, 0.25, 0.25)}
    )
    with pytest.raises(TaskSourceError) as refused:
        load_taskset(buffer.database, changed, tmp_path)
    assert (
        '(stored -> configured): args.count: 2 -> 3, split_shares: [0.8, 0.1, 0.1] -> [0.5, 0.25, 0.25], split: "train" -> not set;'
    ) in str(refused.value)
    with pytest.raises(
        TaskSourceError, match=r'configured\): source: "./gen.py:sums" -> "./gen.py:odd", args.count: 2 -> 3'
    ):
        load_taskset(
            buffer.database,
            config.model_copy(update={"source": "./gen.py:odd", "args": {"count": 3, "level": 1}}),
            tmp_path,
        )


@pytest.mark.parametrize("shares", [(0.5, 0.3, 0.1), (1.2, -0.1, -0.1)])
def test_shares_that_do_not_add_up_are_refused(shares: tuple[float, float, float]) -> None:
    with pytest.raises(ValidationError, match="must add up to 1"):
        TasksetConfig(name="t", source="t.jsonl", split_shares=shares)


@pytest.mark.parametrize(
    ("answer", "stored"),
    [
        ({"x": ["ü", 1]}, '{"x": ["ü", 1]}'),
        ([1, None], "[1, null]"),
        (True, "true"),
        (0, "0"),
        (1.5, "1.5"),
        ("True", "True"),
    ],
)
def test_an_answer_that_is_no_text_is_kept_as_its_json(tmp_path: Path, answer: Any, stored: str) -> None:
    write(tmp_path / "t.jsonl", [{"question": "a", "answer": answer}])
    (task,) = read_tasks(TasksetConfig(name="t", source="t.jsonl"), tmp_path)
    assert task["payload"]["answer"] == stored


def test_text_that_sql_cannot_hold_is_replaced(tmp_path: Path, buffer: Buffer) -> None:
    (tmp_path / "t.jsonl").write_text('{"question": "a\\u0000b \\ud83d", "x": NaN, "task_key": "k\\u0000"}\n')
    assert load_taskset(buffer.database, TasksetConfig(name="t", source="t.jsonl"), tmp_path) == 1
    row = buffer.sql("SELECT task_key, payload FROM rft.task").to_pylist()[0]
    assert row["task_key"] == "k\ufffd"
    assert row["payload"] == {"prompt": "a\ufffdb \ufffd", "answer": None, "metadata": {"x": None}}
