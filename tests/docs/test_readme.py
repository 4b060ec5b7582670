"""README.md and examples/README.md name commands, targets and files that exist, and every example."""

from __future__ import annotations

import re
from pathlib import Path

from typer.main import get_command

from rftcore.cli import app

CHECKOUT = Path(__file__).resolve().parents[2]
EXAMPLES = (CHECKOUT / "examples" / "README.md").read_text(encoding="utf-8")
PAGES = (CHECKOUT / "README.md").read_text(encoding="utf-8") + EXAMPLES
CODE = "\n".join(
    block or span for block, span in re.findall(r"^```sh\n(.*?)^```|`([^`\n]+)`", PAGES, re.MULTILINE | re.DOTALL)
)


def test_every_verb_and_every_target_exists() -> None:
    verbs = set(re.findall(r"\brft ([a-z]+)", CODE))
    targets = set(re.findall(r"\bmake ([a-z-]+)", CODE))
    assert {"run", "sql", "init"} <= verbs and {"demo", "test"} <= targets
    assert verbs <= set(getattr(get_command(app), "commands", {}))
    assert targets <= set(re.findall(r"^([a-z-]+):", (CHECKOUT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def test_every_file_of_a_command_exists() -> None:
    files = re.findall(r"\bexamples/[\w./]+\.(?:yaml|py)\b", CODE)
    assert len(files) > 8
    assert [name for name in files if not (CHECKOUT / name).is_file()] == []


def test_every_example_has_a_row() -> None:
    rows = re.findall(r"^\| \[(\w+)\]\(\1/README\.md\) \|", EXAMPLES, re.MULTILINE)
    assert sorted(rows) == sorted(folder.parent.name for folder in (CHECKOUT / "examples").glob("*/README.md"))
    assert f"[{len(rows)} examples]" in PAGES
