"""Mistakes of a user are reported in one paragraph, before anything is started and without a trace in the buffer."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

import rftdata
from rftcore.cli import run_command
from rftdata.postgres.embedded import EmbeddedServer
from tests.support.command_line import EXAMPLE, Rft, call_rft, rft_environment, rows

# Each starts processes that import the training stack, which adds up.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

CONFIG = {
    "run": {"name": "letters", "seed": 1},
    "model": {"path": "./model"},
    "tasks": [{"name": "letters", "source": "tasks.jsonl"}],
    "pipelines": {"experience": [{"drop_truncated": {"finish_reasons": ["abort"]}}]},
    "algorithm": {"name": "grpo", "group_size": 2},
    "explorer": {
        "engine": "transformers",
        "engine_args": {"dtype": "float32", "context_length": 64},
        "reward": "./reward.py:score",
        "max_tokens": 4,
        "max_refill": 2,
    },
    "trainer": {"batch_groups": 2},
    "steps": 2,
}
REWARD = """
def score(turn, task):
    return float(len(set(turn.response)))
"""


@dataclass
class Place:
    """A folder with a configuration that is right, and a buffer without runs."""

    folder: Path
    buffer: Path

    @property
    def config(self) -> Path:
        return self.folder / "config.yaml"


@pytest.fixture(scope="module")
def place(server_folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("bad")
    subprocess.run([sys.executable, EXAMPLE / "make_model.py", folder / "model"], check=True, capture_output=True)
    (folder / "tasks.jsonl").write_text(
        "".join(json.dumps({"question": f"{i}>", "answer": str(i)}) + "\n" for i in range(10, 40))
    )
    (folder / "reward.py").write_text(REWARD)
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    (folder / "folder.jsonl").mkdir()
    (folder / "line3.jsonl").write_text(
        '{"question": "1>"}\n{"question": "2>"}\n{"question": 3>}\n{"question": "4>"}\n'
    )
    (folder / "column.jsonl").write_text('{"prompt": "1>", "answer": "1"}\n')
    (folder / "empty.jsonl").write_text("")
    (folder / "list.jsonl").write_text('["1>", "1"]\n')
    (folder / "not.parquet").write_text("question,answer\n")
    (folder / "raises.py").write_text("raise RuntimeError('no licence for the judge')\n")
    (folder / "other_name.py").write_text("def scoer(turn, task):\n    return 1.0\n")
    (folder / "no_model").mkdir()
    buffer = server_folders / "bad"
    rftdata.open(str(buffer)).close()
    yield Place(folder, buffer)
    EmbeddedServer(buffer).stop()


def call_here(*arguments: object) -> subprocess.CompletedProcess[str]:
    """What `rft` does with arguments, in this process."""
    output, errors = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        for name, value in rft_environment().items():
            patch.setenv(name, value)
        code = run_command([str(argument) for argument in arguments])
    return subprocess.CompletedProcess(arguments, code, output.getvalue(), errors.getvalue())


def refused(place: Place, *arguments: object, exit_code: int = 2, here: bool = False) -> str:
    """The one paragraph that a command says on refusing; nothing was started and no run is stored."""
    result = call_here(*arguments) if here else call_rft(*arguments, check=False)
    assert result.returncode == exit_code, result.stderr
    assert result.stderr.startswith("rft: ") and result.stderr.count("\n") == 1, result.stderr
    assert "Traceback" not in result.stdout + result.stderr
    assert "defect of rftdata" not in result.stderr
    assert not result.stderr.rstrip().endswith(("?.", "..", ";.")), result.stderr
    if place.buffer.exists():
        assert rows(place.buffer, "select name from rft.run") == rows(place.buffer, "select role from rft.worker") == []
    return result.stderr


def tasks_from(source: str, **more: object) -> str:
    return "tasks=" + json.dumps([{"name": "letters", "source": source, **more}])


# Setting, then the words of: what is wrong, the value, what is allowed, what to do.
WRONG = {
    "task file that is missing": (
        tasks_from("absent.jsonl"),
        ["'letters'", "does not exist", "absent.jsonl", "correct its source"],
    ),
    "task file that is a folder": (
        tasks_from("folder.jsonl"),
        ["'letters'", "is a folder", "folder.jsonl", "correct its source"],
    ),
    "task file with a broken line": (
        tasks_from("line3.jsonl"),
        ["'letters'", "line 3 is not JSON", "line3.jsonl", "repair"],
    ),
    "task file with rows that are lists": (
        tasks_from("list.jsonl"),
        ["row 1", "'letters'", "1>", "correct the source"],
    ),
    "task file of another format": (tasks_from("not.parquet"), ["cannot be read", "not.parquet", "repair or replace"]),
    "task file without the prompt": (
        tasks_from("column.jsonl"),
        ["no column 'question'", "row 1", "allowed: answer, prompt", "prompt: …"],
    ),
    "task file with another prompt": (
        tasks_from("tasks.jsonl", prompt="quest"),
        ["no column 'quest'", "allowed: answer, question", "prompt: …"],
    ),
    "task file with another answer": (
        tasks_from("tasks.jsonl", answer="solution"),
        ["no column 'solution'", "rows 1-30", "allowed: answer, question", "did you mean 'answer'?"],
    ),
    "task file that is empty": (tasks_from("empty.jsonl"), ["'letters' has no task", "empty.jsonl", "check its"]),
    "task source of an unknown kind": (
        tasks_from("tasks.txt"),
        ["unknown kind of source", "tasks.txt", "allowed: reasoning_gym:NAME", ".jsonl"],
    ),
    "stage that is unknown": (
        "pipelines.experience=[{drop_truncatd: {}}]",
        ["stage 1", "unknown operator", "'drop_truncatd'", "allowed:", "did you mean 'drop_truncated'?"],
    ),
    "stage with an unknown argument": (
        "pipelines.experience=[{drop_truncated: {reasons: [abort]}}]",
        ["stage 1", "reasons", "finish_reasons"],
    ),
    "sql with a wrong column": (
        "pipelines.experience=[{sql: 'SELECT * FROM batch WHERE rewrd > 0'}]",
        ["stage 1", "rewrd", "allowed: columns of batch:", "reward", "correct the query"],
    ),
    "sql that does not parse": (
        "pipelines.experience=[{sql: 'SELEC * FROM batch'}]",
        ["stage 1", "SELEC", "correct the query"],
    ),
    "sql that loses the key": (
        "pipelines.experience=[{sql: 'SELECT reward FROM batch'}]",
        ["stage 1", "experience_id", "SELECT list"],
    ),
    "reward file that is missing": (
        "explorer.reward=./absent.py:score",
        ["reward", "does not exist", "absent.py", "correct the path"],
    ),
    "reward file that raises": (
        "explorer.reward=./raises.py:score",
        ["'./raises.py:score'", "RuntimeError: no licence for the judge", "correct"],
    ),
    "reward without the function": (
        "explorer.reward=./other_name.py:score",
        ["other_name.py has no 'score'", "allowed: scoer", "correct"],
    ),
    "reward that is unknown": (
        "explorer.reward=exact_mach",
        ["unknown reward", "'exact_mach'", "allowed:", "did you mean 'exact_match'?"],
    ),
    "model that is missing": (
        "model.path=./absent",
        ["model's folder does not exist", "absent", "allowed: a folder with config.json", "correct model.path"],
    ),
    "model folder without a model": (
        "model.path=./no_model",
        ["not a model", "config.json", "no_model", "correct model.path"],
    ),
    "learning rate below zero": (
        "trainer.learning_rate=-0.001",
        ["'trainer.learning_rate'", "greater than 0", "-0.001", "correct it"],
    ),
    "key that is unknown": (
        "trainer.lerning_rate=0.1",
        ["no key 'trainer.lerning_rate'", "allowed:", "did you mean 'learning_rate'?"],
    ),
    "section that is unknown": (
        "explorr.engine=vllm",
        ["no key 'explorr'", "allowed:", "did you mean 'explorer'?"],
    ),
    "key of the algorithm that is unknown": (
        "algorithm.loss.clipp=0.2",
        ["no key 'algorithm.loss.clipp'", "allowed:", "did you mean 'clip'?"],
    ),
    "key of the engine that is unknown": (
        "explorer.engine_args={dtyp: float32}",
        ["explorer.engine_args.dtyp", "allowed:", "did you mean 'dtype'?"],
    ),
    "key of a taskset that is unknown": (
        tasks_from("tasks.jsonl", prompts="question"),
        ["tasks.0.prompts", "allowed:", "did you mean 'prompt'?"],
    ),
}


@pytest.mark.parametrize(("setting", "words"), WRONG.values(), ids=WRONG)
def test_rft_run_refuses_a(setting: str, words: list[str], place: Place) -> None:
    arguments = ("run", place.config, "--plain", "--buffer", place.buffer, "--set", setting)
    text = refused(place, *arguments, here=True)
    assert [word for word in words if word not in text] == [], text


def test_a_server_that_refuses_connections_is_named_without_the_password(place: Place, tmp_path: Path) -> None:
    text = refused(
        place,
        "run",
        place.config,
        "--plain",
        "--buffer",
        "postgresql://me:secret@127.0.0.1:1/rft",
        "--set",
        f"buffer.segments={tmp_path / 'segments'}",
        exit_code=1,
    )
    assert "127.0.0.1:1/rft" in text and "onnection refused" in text and "correct buffer.uri" in text
    assert "secret" not in text
    assert not (tmp_path / "segments").exists()


def test_a_server_needs_a_folder_for_the_arrays(place: Place) -> None:
    url = "postgresql://me:secret@127.0.0.1:1/rft"
    text = refused(place, "run", place.config, "--plain", "--buffer", url, exit_code=1)
    assert "buffer.segments" in text and "secret" not in text


def test_a_buffer_that_is_a_file_is_refused_and_left_alone(place: Place, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    text = refused(place, "run", place.config, "--plain", "--buffer", tmp_path / "file", exit_code=1)
    assert str(tmp_path / "file") in text and "cannot be created or written" in text and "correct buffer.uri" in text
    assert (tmp_path / "file").read_text() == "mine"


def test_a_buffer_in_a_folder_that_cannot_be_written_is_refused(place: Place, tmp_path: Path) -> None:
    folder = tmp_path / "read-only"
    folder.mkdir(mode=0o555)
    # Nothing is forbidden to root, except where there are no files.
    target = Path("/proc/rft-buffer") if os.geteuid() == 0 else folder / "buffer"
    text = refused(place, "run", place.config, "--plain", "--buffer", target, exit_code=1)
    assert str(target) in text and "cannot be created or written" in text and "correct buffer.uri" in text


def test_a_configuration_that_is_no_yaml_or_no_file_is_refused(place: Place, tmp_path: Path) -> None:
    (tmp_path / "broken.yaml").write_text("run: {name: a\nsteps: 3\n")
    text = refused(place, "run", tmp_path / "broken.yaml", "--buffer", place.buffer)
    assert "broken.yaml is not valid YAML" in text and "line" in text
    text = refused(place, "run", tmp_path, "--buffer", place.buffer)
    assert "configuration file cannot be read" in text and str(tmp_path) in text


@pytest.mark.parametrize("arguments", [["run", "--resume", "NOSUCH"], ["report", "NOSUCH"], ["status", "NOSUCH"]])
def test_a_run_that_does_not_exist_is_refused(arguments: list[str], place: Place) -> None:
    text = refused(place, *arguments, "--buffer", place.buffer)
    assert "contains no run" in text and "rft run CONFIG" in text


def test_check_deep_opens_everything_and_makes_nothing(place: Place, rft: Rft, tmp_path: Path) -> None:
    result = rft("check", "--deep", place.config, "--buffer", tmp_path / "new")
    assert yaml.safe_load(result.stdout)["steps"] == 2
    assert "15 tokens" in result.stderr and "30 tasks" in result.stderr and "'10>'" in result.stderr
    assert "will be created" in result.stderr and "is valid" in result.stderr
    assert not (tmp_path / "new").exists()
    assert "answers, schema" in rft("check", "--deep", place.config, "--buffer", place.buffer).stderr
    assert rows(place.buffer, "select name from rft.run") == []


def test_a_priority_formula_that_the_database_does_not_take_is_refused(place: Place) -> None:
    setting = "sampling={order: prioritized, priority: {formula: 'meen_reward; DROP TABLE rft.draw'}}"
    arguments = [place.config, "--buffer", place.buffer, "--set", setting]
    for text in (
        refused(place, "run", *arguments),
        call_rft("check", "--deep", *arguments, check=False).stderr,
    ):
        assert "sampling.priority.formula" in text and "mean_reward" in text and "is valid" not in text


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (tasks_from("line3.jsonl"), ["line 3 is not JSON"]),
        (tasks_from("absent.jsonl"), ["does not exist"]),
        ("model.path=./no_model", ["config.json"]),
        ("explorer.reward=./raises.py:score", ["no licence"]),
        ("buffer.uri=postgresql://me:secret@127.0.0.1:1/rft", ["buffer.segments"]),
        ("buffer.uri=./config.yaml/buffer", ["config.yaml/buffer"]),
    ],
    ids=["task line", "task file", "model", "reward", "server", "folder"],
)
def test_check_deep_finds_what_a_run_would_stumble_over(setting: str, words: list[str], place: Place) -> None:
    result = call_rft("check", "--deep", place.config, "--set", setting, cwd=place.folder, check=False)
    assert result.returncode in (1, 2), result.stderr
    assert result.stdout == ""  # no configuration that would look valid
    last = result.stderr.splitlines()[-1]
    assert last.startswith("rft: ") and "Traceback" not in result.stderr and "defect" not in last
    assert all(word in last for word in words), result.stderr
    assert "is valid" not in result.stderr and "secret" not in result.stderr


def test_a_stage_that_fails_on_every_row_ends_the_run_and_a_corrected_one_continues(
    place: Place, server_folders: Path
) -> None:
    # It binds, so that only the rows show what is wrong with it.
    broken, fixed = "SELECT * FROM batch WHERE CAST(response || 'x' AS INTEGER) > 0", "SELECT * FROM batch"
    buffer = server_folders / "failing-stage"

    def run(query: str, *more: str) -> subprocess.CompletedProcess[str]:
        chain = json.dumps([{"sql": query}])
        return call_rft(
            "run",
            place.config,
            *more,
            "--plain",
            "--buffer",
            buffer,
            "--set",
            f"pipelines.experience={chain}",
            "--set",
            "pipelines.patience_s=3",
            check=False,
        )

    try:
        result = run(broken)
        assert result.returncode != 0 and "Traceback" not in result.stdout + result.stderr
        last = " ".join(result.stderr.split())
        assert "the pipeline of the run" in last and "(sql) failed" in last and "Conversion Error" in last, last
        # Nothing was dropped for what the stage is to blame for.
        assert rows(buffer, "select count(*) as n from rft.verdict") == [{"n": 0}]
        assert rows(buffer, "select count(*) > 0 as some from rft.experience") == [{"some": True}]
        assert rows(buffer, "select role from rft.worker")  # so their absence says elsewhere that nothing was started

        result = run(fixed, "--resume")
        assert result.returncode == 0, result.stdout + result.stderr
        steps = rows(buffer, "select num_groups from rft.v_train_step")
        assert len(steps) == 2 and all(step["num_groups"] > 0 for step in steps)
    finally:
        if buffer.exists():
            EmbeddedServer(buffer).stop()
