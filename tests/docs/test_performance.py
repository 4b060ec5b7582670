"""The tables of docs/performance.md name commands that exist, and every measurement log is linked from the page."""

from __future__ import annotations

import re
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
PAGE = CHECKOUT / "docs" / "performance.md"
ROWS = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
COMMANDS = sorted(
    {command for row in ROWS for command in re.findall(r"`((?:rft bench|python -m benchmarks\.)[^`]*)`", row)}
)


def test_every_benchmark_of_a_table_exists_with_its_options() -> None:
    assert len(COMMANDS) > 15
    folder = CHECKOUT / "benchmarks"
    sources = "".join(path.read_text(encoding="utf-8") for path in folder.rglob("*.py"))
    for command in COMMANDS:
        name, *options = command.removeprefix("rft bench ").removeprefix("python -m benchmarks.").split()
        assert (folder / f"{name}.py").is_file() or (folder / name / "__main__.py").is_file(), command
        for option in options:
            assert not option.startswith("--") or f'"{option}"' in sources, f"{command}: {option}"


def test_every_log_is_linked() -> None:
    linked = set(re.findall(r"\(measurements/([\w-]+)\.md\)", PAGE.read_text(encoding="utf-8")))
    assert linked == {path.stem for path in (CHECKOUT / "docs" / "measurements").glob("*.md")}
