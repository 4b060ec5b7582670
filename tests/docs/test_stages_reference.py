"""The reference of stages matches the stages."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from operators import OPERATORS
from operators.chain.resolve import resolve_stage
from scripts import stages_reference

CHECKOUT = Path(__file__).resolve().parents[2]


def test_the_stages_reference_is_up_to_date() -> None:
    script = CHECKOUT / "scripts" / "stages_reference.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def test_the_page_is_written_for_users_of_yaml_and_has_data_juicer() -> None:
    page = stages_reference.render()
    python = re.findall(r"`?operators\.\w+|\b\w+Config\b|\bTEMPLATES\b|module's|module header|cls\b|StageConfig", page)
    assert python == []
    assert "## data_juicer\n" in page and "| `recipe` |" in page and "| `process` |" in page
    assert "| `text_key` |" in page and "## Expressions" in page and "{question}" in page
    assert [line for line in page.splitlines() if line.startswith("| `") and line.endswith("|  |")] == []


@pytest.mark.parametrize("name", sorted(OPERATORS.builtins))
def test_every_stage_has_examples_that_hold_and_every_argument_a_meaning(name: str) -> None:
    examples = stages_reference.examples(name)
    assert examples
    for args in (one for one in examples if "…" not in str(one)):
        resolve_stage(name, args, CHECKOUT)
    rows = stages_reference.arguments(stages_reference.operator_class(name).Config)
    assert [argument for argument, _, _, meaning in rows if not meaning] == []
