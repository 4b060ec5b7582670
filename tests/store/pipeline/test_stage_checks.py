"""`rft check --deep` prepares every stage and tries it on a few experiences, and finds what would end a run at its first batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rftcore.cli import run_command
from tests.support.models import make_tiny_model

SUMS = [{"question": f"How much is {i} plus {i}?", "answer": str(2 * i)} for i in range(4)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def check(folder: Path, tiny: Path, pipelines: dict[str, Any]) -> int:
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SUMS))
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
                "pipelines": pipelines,
            }
        )
    )
    code = run_command(["check", "--deep", str(folder / "run.yaml")])
    assert not (folder / "buffer").exists()
    return code


@pytest.mark.parametrize(
    ("pipelines", "words"),
    [
        (
            {"task": ["quality_score", {"text_chunk_mapper": {"max_len": 4, "overlap_len": 9}}]},
            ["pipelines.task: stage 2 of the pipeline (text_chunk_mapper)", "overlap_len must be less than max_len"],
        ),
        (
            {
                "experience": [
                    {
                        "llm_judge": {
                            "endpoint": {"url": "http://127.0.0.1:9", "model": "m", "api_key_env": "NO_SUCH_KEY"}
                        }
                    }
                ]
            },
            ["pipelines.experience: stage 1 of the pipeline (llm_judge)", "NO_SUCH_KEY"],
        ),
        (
            {"experience": [{"decontaminate": {"against": ["taskset:gsm8k"]}}]},
            ["pipelines.experience: stage 1 of the pipeline (decontaminate)", "'gsm8k'", "allowed: sums"],
        ),
        (
            {"experience": [{"decontaminate": {"against": ["taskset:sums"], "against_column": "text"}}]},
            ["taskset:sums has no column 'text'", "allowed: task_key, prompt, answer"],
        ),
    ],
)
def test_an_input_that_a_stage_cannot_be_prepared_with_is_named(
    tmp_path: Path, tiny: Path, capsys: pytest.CaptureFixture[str], pipelines: dict[str, Any], words: list[str]
) -> None:
    assert check(tmp_path, tiny, pipelines) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in words), said


def test_stages_that_are_ready_are_named(tmp_path: Path, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chains = {
        "task": [{"text_length_filter": {"max_len": 100}}],
        "experience": [{"decontaminate": {"against": ["taskset:sums"]}}, {"llm_judge": {"endpoint": "policy"}}],
    }
    assert check(tmp_path, tiny, chains) == 0
    said = capsys.readouterr().err
    assert "pipelines.task: text_length_filter: ready" in said
    assert "pipelines.experience: decontaminate, llm_judge: ready, and tried on 4 experiences" in said
    assert "pipelines.experience: llm_judge was not tried: it may run or ask a model" in said


FAILING = """
import json
def strict(row):
    assert row["reward"] in (0.0, 1.0) and row["response"] == row["answer"]
    return False
def fragile(row):
    return json.loads(row["metadata"])["level"] > 1
"""


def test_a_stage_that_fails_on_its_first_row_is_named_though_an_earlier_stage_drops_all_rows(
    tmp_path: Path, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.py").write_text(FAILING)
    assert check(tmp_path, tiny, {"experience": ["./own.py:strict", "./own.py:fragile"]}) == 1
    said = capsys.readouterr().err
    assert "pipelines.experience: stage 2 of the pipeline (./own.py:fragile) failed" in said and "'level'" in said
