"""`rft check --deep` on what selectors need of their tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rftcore.cli import run_command
from rftdata import Buffer
from rftdata.config import TasksetConfig
from rftdata.tasks import load_taskset
from tests.support.models import make_tiny_model

ROWS = [{"question": f"How much is {i} plus {i}?", "answer": str(2 * i), "features": {"level": i}} for i in range(8)]
LEVELS = {"difficulty_score": {"features": {"level": [0, 7]}}}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def write(folder: Path, tiny: Path, rows: list[dict[str, Any]], selector: dict[str, Any], stages: list[Any]) -> str:
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.yaml").write_text(
        yaml.safe_dump(
            {
                "run": {"name": "r"},
                "model": {"path": str(tiny)},
                "algorithm": {"name": "grpo"},
                "steps": 1,
                "explorer": {"reward": ["exact_match"]},
                "trainer": {"batch_groups": 2},
                "buffer": {"uri": str(folder / "buffer")},
                "tasks": [{"name": "sums", "source": "sums.jsonl"}],
                "selector": selector,
                "pipelines": {"task": stages},
            }
        )
    )
    return str(folder / "run.yaml")


def by(feature: str) -> dict[str, Any]:
    return {"type": "easy_to_hard", "features": [feature]}


SOME = [*ROWS, {"question": "Why?", "answer": "so", "features": {"level": True}}]


@pytest.mark.parametrize(
    ("rows", "selector", "stages", "words"),
    [
        (
            ROWS,
            by("-hardness"),
            [],
            ["'easy_to_hard'", "'sums'", "'hardness'", "8 of its 8 tasks", "features of these tasks: level"],
        ),
        (SOME, by("level"), [], ["'level'", "1 of its 9 tasks"]),
        (ROWS, by("quality"), [LEVELS], ["'quality'", "difficulty, level"]),
        (ROWS, {"type": "difficulty", "features": ["weak", "level"]}, [], ["'difficulty'", "'weak'"]),
    ],
)
def test_a_feature_that_the_selector_needs_and_no_task_has_is_reported_before_the_run(
    tmp_path: Path,
    tiny: Path,
    capsys: pytest.CaptureFixture[str],
    rows: list[dict[str, Any]],
    selector: dict[str, Any],
    stages: list[Any],
    words: list[str],
) -> None:
    assert run_command(["check", "--deep", write(tmp_path, tiny, rows, selector, stages)]) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in words), said
    assert not (tmp_path / "buffer").exists()


@pytest.mark.parametrize(
    ("rows", "selector", "stages"),
    [
        (ROWS, by("level"), []),
        (ROWS, by("difficulty"), [LEVELS]),
        (ROWS, by("priority"), [LEVELS, "task_priority"]),
        (ROWS, by("anything"), [{"sql": "SELECT b.*, 1 AS one FROM batch b JOIN batch c USING (experience_id)"}]),
        (ROWS, {"type": "difficulty"}, []),
    ],
)
def test_a_feature_of_the_source_or_of_a_stage_is_accepted(
    tmp_path: Path, tiny: Path, capsys: pytest.CaptureFixture[str], rows: Any, selector: Any, stages: Any
) -> None:
    assert run_command(["check", "--deep", write(tmp_path, tiny, rows, selector, stages)]) == 0
    assert "needs the feature" not in capsys.readouterr().err


def test_tasks_that_a_stage_may_drop_are_only_reported(
    tmp_path: Path, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = [{"sql": "SELECT * FROM batch WHERE answer <> 'so'"}]
    assert run_command(["check", "--deep", write(tmp_path, tiny, SOME, by("level"), stages)]) == 0
    assert "the stages of pipelines.task must drop those" in capsys.readouterr().err


def test_features_that_somebody_set_in_the_buffer_count(
    buffer: Buffer, tmp_path: Path, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, tiny, ROWS, by("hardness"), [])
    places = {"uri": buffer.config.uri, "segments": buffer.config.segments}
    command = ["check", "--deep", file, "--set", f"buffer={json.dumps(places)}"]
    load_taskset(buffer.database, TasksetConfig(name="sums", source="sums.jsonl"), tmp_path)
    assert run_command(command) == 2
    buffer.sql("UPDATE rft.task SET features = features || '{\"hardness\": 1}'")
    assert run_command(command) == 0
    # A new row has what its source gives it, stored ones keep what was set.
    with (tmp_path / "sums.jsonl").open("a") as source:
        source.write('{"question": "9 + 9", "answer": "18", "features": {"hardness": 3}}\n')
    assert run_command(command) == 0
    with (tmp_path / "sums.jsonl").open("a") as source:
        source.write('{"question": "8 + 9", "answer": "17"}\n')
    capsys.readouterr()
    assert run_command(command) == 2
    assert "needs the feature 'hardness', which is not a number in 1 of its 10 tasks" in capsys.readouterr().err
    buffer.sql("UPDATE rft.task SET features = features || '{\"hardness\": null}' WHERE task_id = 1")
    (tmp_path / "sums.jsonl").write_text(
        "".join(json.dumps({**row, "features": {"hardness": 1}}) + "\n" for row in ROWS)
    )
    assert run_command(command) == 2
    assert "not a number in 1 of its 8 tasks" in capsys.readouterr().err


def test_rows_that_repeat_a_prompt_are_reported(tmp_path: Path, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, tiny, [*ROWS, {**ROWS[2], "answer": "five"}], by("level"), [])
    assert run_command(["check", "--deep", file]) == 0
    said = capsys.readouterr().err
    assert "taskset sums: 8 tasks" in said and "such as row 9, which repeats row 3" in said
