"""The table of Data-Juicer's operators lists exactly those that are installed."""

from __future__ import annotations

import re
from pathlib import Path

from operators.data_juicer.catalogue import installed_version, operator_names

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "data-juicer.md"


def test_the_table_lists_the_installed_operators() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == operator_names()
    assert f"py-data-juicer {installed_version()} was tried" in page, "run scripts/data_juicer_table.py again"
