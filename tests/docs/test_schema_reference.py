"""The schema reference matches the schema."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]


def test_the_schema_reference_is_up_to_date() -> None:
    script = CHECKOUT / "scripts" / "schema_reference.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def test_every_table_and_view_of_the_schema_has_a_comment() -> None:
    page = (CHECKOUT / "docs" / "reference" / "schema.md").read_text(encoding="utf-8")
    sections = page.split("\n### `")[1:]
    assert sections
    uncommented = [
        section.partition("`")[0] for section in sections if section.partition("\n\n")[2].startswith(("\n", "|"))
    ]
    assert uncommented == []
