"""Kinds of labels from a configuration: `rft label kind`, and what a run defines when it starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rftcore.cli import run_command
from rftcore.launch.preparation import prepare_run
from rftdata import Buffer
from rftdata.annotations import kinds
from rftdata.errors import ConfigError, RftError
from tests.store.launch.test_preparation import resolved

YAML = """
labels:
  kinds:
    - {kind: helpful, type: choice, spec: {choices: ["yes", "no"]}, instruction: Does it help, reopens: true}
    - {kind: critique, type: text}
"""


@pytest.fixture(autouse=True)
def folder_of_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RFT_SEGMENTS", str(tmp_path / "segments"))


def rft(buffer: Buffer, *words: str) -> int:
    return run_command(["label", "kind", *words, "--buffer", buffer.config.uri])


def test_kinds_are_defined_changed_listed_and_retired(
    buffer: Buffer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "labels.yaml"
    file.write_text(YAML)
    assert rft(buffer, "define", str(file)) == 0
    assert capsys.readouterr().out == "helpful: version 1\ncritique: version 1\n"
    file.write_text(YAML.replace('"no"]', '"no", "partly"]'))
    assert rft(buffer, "define", str(file), "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"defined": {"helpful": 2}, "unchanged": ["critique"]}
    assert rft(buffer, "list") == 0
    assert "partly" in capsys.readouterr().out
    assert rft(buffer, "show", "helpful", "--json") == 0
    versions = json.loads(capsys.readouterr().out)
    assert [(v["version"], v["reopens"]) for v in versions] == [(2, True), (1, True)]
    assert rft(buffer, "retire", "helpful") == 0
    assert [kind.kind for kind in kinds(buffer)] == ["critique"]
    assert rft(buffer, "retire", "unknown") == 2
    assert "there is no such kind of label" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("labels: {kinds: [{kind: Odd, type: bool}]}", "labels.yaml: the key 'labels.kinds.0.kind'"),
        ("labels: {kinds: [{kind: a, type: stars}]}", "labels.kinds.0.type"),
        ("labels: {kinds: [{kind: a, type: bool}, {kind: a, type: text}]}", "the kind a is defined twice"),
        ("labels: {kinds: [{kind: a, type: bool}, {kind: b, type: choice}]}", "must have choices"),
        ("run: {name: a}", "has no section labels"),
    ],
)
def test_a_wrong_file_defines_nothing(
    buffer: Buffer, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, told: str
) -> None:
    (tmp_path / "labels.yaml").write_text(text)
    assert rft(buffer, "define", str(tmp_path / "labels.yaml")) == 2
    assert told in capsys.readouterr().err
    assert kinds(buffer) == []


@pytest.mark.usefixtures("beside_a_model")
def test_a_run_defines_the_kinds_of_its_configuration_and_says_what_is_new(buffer: Buffer) -> None:
    Path("sums.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n')
    said: list[str] = []
    labels = {"kinds": [{"kind": "good", "type": "bool"}]}
    prepare_run(resolved(labels=labels), buffer, report=said.append)
    assert said == ["the kind of label good is new"]
    labels["kinds"][0]["blind"] = True  # type: ignore[assignment]
    prepare_run(resolved(labels=labels, run={"name": "two"}), buffer, report=said.append)
    assert said[1:] == ["the kind of label good was changed: people label with version 2 from now on"]
    labels["kinds"][0] |= {"type": "choice", "spec": {"choices": ["a"]}}
    with pytest.raises(RftError, match="must have at least 2 choices"):
        prepare_run(resolved(labels=labels, run={"name": "three"}), buffer)
    assert [run.name for run in buffer.runs()] == ["two", "sums"]


@pytest.mark.usefixtures("beside_a_model")
def test_a_run_whose_stages_read_or_suggest_an_unknown_kind_or_ask_for_a_wrong_one_is_not_created(
    buffer: Buffer,
) -> None:
    Path("sums.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n')
    judge = {"endpoint": {"url": "http://localhost/v1", "model": "m"}, "suggests": "quality"}
    stages: list[dict[str, Any]] = [
        {"threshold": {"column": "label_helpfull.mean", "min": 1}},
        {"llm_judge": judge},
        {"human_review": {"kind": "polite"}},
        {"human_review": {"kind": "tone", "passing": ["kind"]}},
        {"human_review": {"kind": "best"}},
    ]
    tone = {"kind": "tone", "type": "choice", "spec": {"choices": ["friendly", "rude"]}}
    for stage in stages:
        labels = {
            "kinds": [{"kind": "best", "type": "ranking", "target": "group"}, {"kind": "helpful", "type": "bool"}, tone]
        }
        with pytest.raises(ConfigError, match=r"kind of label.*allowed: best, helpful, tone"):
            prepare_run(resolved(labels=labels, pipelines={"experience": [stage]}), buffer)
    assert buffer.runs() == []
