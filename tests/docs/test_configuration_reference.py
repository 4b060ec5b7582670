"""The reference of configuration keys and the schema for editors: complete, current, and true of every example."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from rftcore.cli import run_command
from rftcore.config.run import STAGES, RunConfig, load_stages, parse_config
from rftcore.config_reference import keys
from rftcore.config_schema import config_schema
from rftdata.config import merged
from scripts import configuration_reference
from tests.support.command_line import CHECKOUT

FILES = sorted((CHECKOUT / "examples").glob("**/*.yaml"))
LEAST = {
    "run": {"name": "sums"},
    "model": {"path": "./model"},
    "tasks": [{"name": "a", "source": "a.jsonl"}],
    "algorithm": {"name": "grpo"},
    "explorer": {"reward": "exact_match"},
    "trainer": {"batch_groups": 1},
    "steps": 1,
}


@cache
def validator() -> Any:
    return jsonschema.Draft202012Validator(config_schema())


def mistakes(raw: Any) -> list[str]:
    return [error.message for error in validator().iter_errors(raw)]


def test_the_page_and_the_schema_are_up_to_date() -> None:
    script = CHECKOUT / "scripts" / "configuration_reference.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check"],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(CHECKOUT)},
    )
    assert done.returncode == 0, done.stderr


def test_every_key_has_a_meaning() -> None:
    assert [key.name for key in keys() if not key.meaning] == []
    assert {key.name.removesuffix("[]") for key in keys() if "." not in key.name} == set(RunConfig.model_fields)


@pytest.mark.parametrize("section", configuration_reference.EXAMPLES)
def test_the_example_of_a_section_is_a_configuration(section: str, tmp_path: Path) -> None:
    raw = merged(LEAST, yaml.safe_load(configuration_reference.EXAMPLES[section]))
    if section == "sampling":
        raw = {key: value for key, value in raw.items() if key not in ("tasks", "steps")}
    parse_config(raw, tmp_path, "an example")
    assert mistakes(raw) == []


def test_the_schema_names_mistakes_wherever_they_are() -> None:
    for wrong in ({"trainer": {"lerning_rate": 1}}, {"steps": "many"}, {"buffer": {"listen": 3}}, {"explorre": {}}):
        assert mistakes({**LEAST, **wrong}) != [], wrong
    assert mistakes({key: value for key, value in LEAST.items() if key != "model"}) != []
    assert mistakes({**LEAST, STAGES: [{"algorithm": {"name": "sft"}}]}) != [], "a stage needs a name"
    assert mistakes({**LEAST, "pipelines": {"experience": [{"drop_truncated": {"finish_reason": []}}]}}) != []
    assert (
        mistakes({**LEAST, "pipelines": {"experience": [{"./mine.py:Stage": {"any": 1}}, "text_length_filter"]}}) == []
    )


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(CHECKOUT / "examples")))
def test_an_example_names_the_schema_and_keeps_to_it(file: Path) -> None:
    first, _, _ = file.read_text(encoding="utf-8").partition("\n")
    named = first.removeprefix("# yaml-language-server: $schema=")
    assert (file.parent / named).resolve() == configuration_reference.SCHEMA
    load_stages(file)
    assert mistakes(yaml.safe_load(file.read_text(encoding="utf-8"))) == []


def test_keys_are_shown_and_unknown_ones_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["config", "trainer.learning_rate"]) == 0
    assert capsys.readouterr().out.startswith("trainer.learning_rate: number, ")
    assert run_command(["config", "selector", "--json"]) == 0
    shown = {key["name"]: key["plugin"] for key in json.loads(capsys.readouterr().out)}
    assert shown["selector.type"] is None and shown["selector.screen_rollouts"] == "selector.type: speed"
    assert run_command(["config"]) == 0
    assert "explorer: mapping" in capsys.readouterr().out
    assert run_command(["config", "tasks[0].split"]) == 0
    assert capsys.readouterr().out.startswith("tasks[].split: ")
    for elsewhere, page in {
        "stages": "config",
        "algorithm.loss.clip": "algorithms",
        "pipelines.experience.drop_stale": "stages",
    }.items():
        assert run_command(["config", elsewhere]) == 2
        assert f"`rft docs {page}`" in capsys.readouterr().err
    assert run_command(["config", "offset"]) == 2
    assert "did you mean 'sync.offset'?" in capsys.readouterr().err


def test_the_schema_is_written_where_an_editor_finds_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.schema.json"
    assert run_command(["schema", str(file)]) == 0
    assert f"$schema={file}" in capsys.readouterr().out
    assert file.read_text() == configuration_reference.render_schema()
    assert run_command(["schema", str(tmp_path / "missing" / "x.json")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    file.write_text(file.read_text()[:1000])  # an older one
    assert run_command(["schema", str(file)]) == 0
    assert file.read_text() == configuration_reference.render_schema()
    config = tmp_path / "config.yaml"
    config.write_text("# yaml-language-server: $schema=config.schema.json\nrun: {name: mine}\n")
    assert run_command(["schema", str(config)]) == 2
    assert "holds something else" in capsys.readouterr().err
    assert config.read_text().endswith("run: {name: mine}\n")
