"""Task sources and queries that do not end: each wait has a limit, and commands that only check return."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rftcore.checks.tasks import TasksetSample, describe_tasks
from rftcore.cli import run_command
from rftcore.config.run import load_config, parse_config
from rftcore.resolved import ResolvedRun
from rftcore.task_pipeline.pipeline import load_tasks
from rftcore.task_pipeline.sources import check_tasks, first_tasks
from rftdata import Buffer
from rftdata.attempts import stored_selection
from rftdata.attempts.sampling import checked_formula
from rftdata.config import TasksetConfig
from rftdata.errors import ConfigError, QueryError, TaskSourceError
from rftdata.tasks import load_taskset, read_tasks
from rftdata.tasks.rows import Reading
from rftdata.tasks.sources import reading_for
from rftdata.user_code.time_limits import at_most
from tests.support.models import make_tiny_model, make_unopened_model

SOURCES = """
import itertools
import time


def hangs(after):
    for number in range(after):
        yield {"question": f"What is {number}?", "answer": "1"}
    while True:
        pass


def hangs_before():
    while True:
        pass


def never_ends():
    for number in itertools.count():
        yield {"question": f"What is {number}?", "answer": "1"}


def starts_slowly():
    time.sleep(1)
    yield {"question": "What is it?", "answer": "1"}


def has_answers_later():
    for number in itertools.count():
        yield {"question": f"What is {number}?", **({"answer": "1"} if number > 2 else {})}
        time.sleep(0.1)


def repeats():
    while True:
        yield {"question": "What is it?", "answer": "1"}
"""
ENDLESS = "(SELECT count(*) FROM generate_series(1, 1000000000000))"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tasks.py").write_text(SOURCES)
    make_unopened_model(tmp_path / "model")
    return tmp_path


def taskset(function: str, **changes: Any) -> TasksetConfig:
    return TasksetConfig.model_validate({"name": "t", "source": f"./tasks.py:{function}", "timeout_s": 1, **changes})


def test_a_generator_that_hangs_is_named_with_the_row_and_the_line(folder: Path) -> None:
    with pytest.raises(TaskSourceError) as raised:
        list(read_tasks(taskset("hangs", args={"after": 2}), folder))
    assert "row 3 of the task source './tasks.py:hangs' did not return within 1 s" in str(raised.value)
    assert "tasks.py, line" in str(raised.value) and "in hangs" in str(raised.value)
    assert "raise timeout_s of the taskset 't'" in str(raised.value)
    with pytest.raises(TaskSourceError, match="row 1 of the task source"):
        list(read_tasks(taskset("hangs_before"), folder))


def test_what_a_set_needs_of_a_source_is_taken_before_it_hangs(buffer: Buffer, folder: Path) -> None:
    assert load_taskset(buffer.database, taskset("hangs", args={"after": 2}, limit=2), folder) == 2
    # Nothing is stored of a source that hangs.
    other = taskset("hangs", name="other", args={"after": 5})
    with pytest.raises(TaskSourceError, match="row 6 of"):
        load_taskset(buffer.database, other, folder)
    assert buffer.sql("SELECT DISTINCT taskset FROM rft.task")["taskset"].to_pylist() == ["t"]


def test_a_query_as_a_source_is_ended_by_the_server(buffer: Buffer) -> None:
    endless = taskset("", source=f"sql: SELECT {ENDLESS} AS question", args={"url": buffer.config.uri})
    with pytest.raises(TaskSourceError, match=r"taskset 't'.* within 1 s|within 1 s .taskset 't'"):
        list(read_tasks(endless, Path()))


@pytest.mark.parametrize("function", ["never_ends", "repeats"])
def test_a_source_that_yields_for_ever_is_looked_at_for_a_while(folder: Path, function: str) -> None:
    with reading_for(0.3) as reading:
        tasks = list(read_tasks(taskset(function, timeout_s=600), folder))
    assert reading.was_cut and reading.num_rows >= len(tasks) > 0
    with reading_for(60) as reading:
        list(read_tasks(taskset("hangs", args={"after": 3}, limit=3, timeout_s=600), folder))
    assert not reading.was_cut


def test_the_first_tasks_of_a_source_that_repeats_itself_for_ever_are_found(folder: Path) -> None:
    assert len(first_tasks(taskset("repeats", timeout_s=600), folder, None, 64, Reading(), looking_s=0.3)) == 1


def test_the_first_row_of_a_source_may_take_long(folder: Path) -> None:
    with reading_for(0.9) as reading:  # less than it takes
        assert len(list(read_tasks(taskset("starts_slowly", timeout_s=600), folder))) == 1
    assert reading.num_rows == 1 and not reading.was_cut


@pytest.mark.parametrize(
    "column", [{}, {"answer": "solution"}, {"split": "test", "split_shares": (0.998, 0.001, 0.001)}]
)
def test_what_the_rest_of_a_source_may_have_is_not_missed(folder: Path, column: dict[str, Any]) -> None:
    """No answer, no such column, no task of the split in the rows that were read in time: the others may have them."""
    slow = {"name": "t", "source": "./tasks.py:has_answers_later", **column}
    config = load_config(configuration(folder, tasks=[slow]))
    resolved = ResolvedRun(config)
    check_tasks(resolved, looking_s=0.15)
    sentences = list(describe_tasks(resolved, TasksetSample(config.tasks[0], is_trained=True, read_s=0.15), None))
    assert "its source has not ended after" in sentences[0]


def configuration(folder: Path, **changes: Any) -> Path:
    raw: dict[str, Any] = {
        "run": {"name": "r"},
        "model": {"path": "./model"},
        "algorithm": {"name": "grpo"},
        "explorer": {"reward": ["exact_match"]},
        "trainer": {"batch_groups": 2, "learning_rate": 0.001},
        "steps": 1,
        "tasks": [{"name": "t", "source": "t.jsonl"}],
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({**raw, **changes}))
    return path


def test_check_comes_back_from_a_query_that_does_not_end(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stage = {"sql": "SELECT * FROM batch WHERE (SELECT count(*) FROM range(1000000000000)) > 0"}
    config = configuration(folder, pipelines={"experience": [stage]})
    code = run_command(["check", str(config), "--wait-s", "1"])
    error = capsys.readouterr().err
    assert code == 1
    assert (
        "pipelines.experience: checking stage 1 of the pipeline (sql) on a batch without rows did not return" in error
    )
    assert "rft check waits 1 s at most, and a run 600 s" in error
    assert "Stack of the function" not in error  # none of it is the user's


def test_the_stack_of_the_users_code_is_printed_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "spins.py").write_text(
        "from operators.base import Operator\n\n\nclass Spins(Operator):\n    rowwise = True\n\n"
        "    def apply(self, table):\n        return None\n\n"
        "    def validate_schema(self, schema):\n        while True:\n            pass\n"
    )
    stages = {"experience": ["./spins.py:Spins"]}
    assert run_command(["check", str(configuration(folder, pipelines=stages)), "--wait-s", "0.5"]) == 1
    error = capsys.readouterr().err
    assert error.count("Stack of the function") == 1 and "in validate_schema" in error


def test_a_deep_check_of_sources_that_hang_or_never_end_comes_back(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_tiny_model(folder / "model")
    tasks = [{"name": "t", "source": "./tasks.py:never_ends"}]
    path = configuration(folder, tasks=tasks, buffer={"uri": str(folder / "buffer")})
    assert run_command(["check", str(path), "--deep", "--read-s", "1", "--wait-s", "240"]) == 0
    assert "its source has not ended after" in capsys.readouterr().err

    tasks = [{"name": "t", "source": "./tasks.py:hangs", "args": {"after": 4}}]
    path = configuration(folder, tasks=tasks, buffer={"uri": str(folder / "buffer")})
    assert run_command(["check", str(path), "--deep", "--wait-s", "1"]) == 2
    error = capsys.readouterr().err
    assert "row 5 of the task source './tasks.py:hangs' did not return within 1 s" in error
    assert "Stack of the function" in error and "in hangs" in error


def test_a_formula_and_a_selection_are_ended_by_the_server(buffer: Buffer) -> None:
    with pytest.raises(ConfigError, match="statement timeout"):
        checked_formula(buffer.database, "length(factorial(32000)::text)", limit_s=0.01)
    with at_most(0.2, "rft check"), pytest.raises(QueryError, match=r"did not end within 0\.2 s"):
        stored_selection.select(buffer.database, f"SELECT {ENDLESS} AS experience_id")


def test_a_task_at_which_a_rule_loops_is_excluded_and_the_others_are_decided_on(buffer: Buffer, folder: Path) -> None:
    rows = [{"question": f"How much is {number} plus 1?", "answer": "1"} for number in range(20)]
    (folder / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rules.py").write_text(
        "def short(row):\n    while '13 plus' in row['prompt']:\n        pass\n    return True\n"
    )
    raw = yaml.safe_load(configuration(folder).read_text())
    raw["pipelines"] = {"task": [{"./rules.py:short": {"run": {"timeout_s": 1}}}]}
    (done,) = load_tasks(ResolvedRun(parse_config(raw, folder, "test")), buffer)
    assert (done.num_active, done.num_excluded) == (19, 1)
    row = buffer.sql("SELECT reason FROM rft.v_task WHERE status = 'excluded'").to_pylist()[0]
    assert "did not return for experience" in row["reason"] and "rules.py, line" in row["reason"]
