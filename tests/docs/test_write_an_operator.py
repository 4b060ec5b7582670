"""What the how-to says about writing an operator holds: its files load, its YAML builds, its test passes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml

from operators.chain.build import build_chain
from tests.support.batches import batch_of_groups

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "write-an-operator.md"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        (tmp_path / name).write_text(code, encoding="utf-8")
    return tmp_path


def stages() -> list[dict[str, Any]]:
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return [entry for block in blocks for entry in yaml.safe_load(block)]


def test_the_stages_of_the_page_do_what_it_states(folder: Path) -> None:
    responses = ["Yes.", "I am Sorry.", "x" * 201, "Why? What? Who?", "Is it? Yes, four."]
    result = build_chain(stages(), folder).run(batch_of_groups([1] * 5, response=responses))
    assert result.decisions["reason"].to_pylist() == [
        None,
        "says 'sorry'",
        "has a line of more than 200 characters",
        "num_questions 3 > max 2",
        None,
    ]
    assert result.decisions["reward"].to_pylist() == [None, None, None, None, 0.9]
    assert result.scores[0].table.schema.field("num_questions").type == pa.int64()


def test_the_test_of_the_page_passes(folder: Path) -> None:
    found: dict[str, Any] = {}
    exec((folder / "test_longest.py").read_text(encoding="utf-8"), found)
    found["test_long_lines_are_dropped"](folder)


def test_an_edited_file_is_another_version(folder: Path) -> None:
    before = build_chain(stages(), folder).version
    assert build_chain(stages(), folder).version == before
    (folder / "questions.py").write_text((folder / "questions.py").read_text() + "\n# edited\n")
    assert build_chain(stages(), folder).version != before
