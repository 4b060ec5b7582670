"""The reference of algorithms matches the presets and parts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rftcore.algorithms import build_algorithm
from rftcore.algorithms.presets import presets
from rftdata.plugins import Registry
from scripts import algorithm_reference
from scripts.stages_reference import arguments

CHECKOUT = Path(__file__).resolve().parents[2]
PAGE = (CHECKOUT / "docs" / "reference" / "algorithms.md").read_text(encoding="utf-8")
PARTS = [(kinds, name) for _, kinds in algorithm_reference.KINDS for name in sorted(kinds.builtins)]


def test_the_reference_of_algorithms_is_up_to_date() -> None:
    script = CHECKOUT / "scripts" / "algorithm_reference.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", sorted(presets()))
def test_a_preset_s_keys_on_the_page_make_the_preset(name: str) -> None:
    section = PAGE.partition(f"\n### {name}\n")[2].partition("\n### ")[0]
    keys = yaml.safe_load(section.partition("```yaml\n")[2].partition("```")[0])
    assert keys == presets()[name].parts and build_algorithm(name, keys).config == build_algorithm(name).config


@pytest.mark.parametrize(("kinds", "name"), PARTS, ids=[f"{kinds.kind} {name}" for kinds, name in PARTS])
def test_every_key_of_a_part_has_a_meaning_and_every_part_a_formula(kinds: Registry[Any], name: str) -> None:
    section = PAGE.partition(f"\n### {name} ({kinds.kind})\n")[2].partition("\n### ")[0]
    assert "```text\n" in section
    assert [key for key, _, _, meaning in arguments(kinds.load(name).Config) if not meaning or key not in section] == []
