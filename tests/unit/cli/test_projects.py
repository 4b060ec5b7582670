"""`rft init`: projects are complete and valid, and no file is overwritten."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from rftcore.cli import run_command
from rftcore.config.run import load_stages
from rftcore.projects import KINDS, write_project
from rftdata.errors import ConfigError, ConflictError
from rftdata.files.durable import draft_folder
from tests.support.models import make_tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_project_is_complete_and_valid(
    kind: str, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new" / "project"
    assert run_command(["init", kind, str(folder)]) == 0
    assert "cat README.md" in capsys.readouterr().out
    schema = json.loads((folder / "config.schema.json").read_text())
    for file in folder.glob("*.yaml"):
        text = file.read_text()
        assert text.startswith("# yaml-language-server: $schema=./config.schema.json\n")
        load_stages(file)
        jsonschema.validate(yaml.safe_load(text), schema)
    # Everything is tried but the model itself: tasks are read, rewards and workflows run with a stand-in for it, stages on their rollouts.
    if kind != "dpo":
        assert run_command(["check", "--deep", str(folder / "config.yaml"), "--set", f"model.path={tiny}"]) == 0
    else:  # there are no pairs yet
        assert run_command(["check", str(folder / "config.yaml")]) == 0
        assert run_command(["check", "--deep", str(folder / "collect.yaml"), "--set", f"model.path={tiny}"]) == 0
    page = (folder / "README.md").read_text()
    assert "rft run config.yaml" in page and all((folder / name).is_file() for name in ("config.yaml", ".gitignore"))


def test_tasks_have_the_columns_that_the_configuration_names_and_differ(tmp_path: Path) -> None:
    assert run_command(["init", "grpo", str(tmp_path / "p")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "p" / "tasks.jsonl").read_text().splitlines()]
    assert len({row["question"] for row in rows}) == len(rows) == 400
    assert all(eval(row["question"].removesuffix("=")) == int(row["answer"]) for row in rows)


def test_an_empty_folder_is_filled_and_another_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert run_command(["init", "sft", "."]) == 0
    before = {path.name: path.read_bytes() for path in Path().iterdir()}
    assert "config.yaml" in before
    assert run_command(["init", "grpo", "."]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in Path().iterdir()} == before
    (tmp_path / "file").write_text("mine")
    assert run_command(["init", "grpo", str(tmp_path / "file")]) == 2
    assert (tmp_path / "file").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".unfinished")] == []


def test_an_unknown_kind_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["init", "gpro", str(tmp_path / "p")]) == 2
    assert "did you mean 'grpo'?" in capsys.readouterr().err and not (tmp_path / "p").exists()


def test_of_two_processes_that_fill_one_folder_the_second_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other project is finished after this one has found the folder empty."""
    (tmp_path / "p").mkdir()
    mkdir, others = os.mkdir, ["sft"]

    def after_the_other(path: Path, *arguments: Any, **options: Any) -> None:
        if others and str(path).endswith(".unfinished"):
            write_project(others.pop(), tmp_path / "p")
        mkdir(path, *arguments, **options)

    monkeypatch.setattr(os, "mkdir", after_the_other)
    with pytest.raises(ConfigError, match="is not empty"):
        write_project("grpo", tmp_path / "p")
    assert others == [] and "chats.jsonl" in os.listdir(tmp_path / "p")
    assert "tasks.jsonl" not in os.listdir(tmp_path / "p") and os.listdir(tmp_path) == ["p"]


def test_a_project_that_another_process_is_writing_is_refused(tmp_path: Path) -> None:
    with draft_folder(tmp_path / "p"), pytest.raises(ConflictError, match="another process is writing"):
        write_project("grpo", tmp_path / "p")
