"""The tables of docs/performance.md name commands that exist, and every measurement log is linked from the page."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.__main__ import BENCHMARKS

CHECKOUT = Path(__file__).resolve().parents[2]
PAGE = (CHECKOUT / "docs" / "performance.md").read_text(encoding="utf-8")
ROWS = "\n".join(re.findall(r"^\| .*", PAGE, re.MULTILINE))
COMMANDS = sorted(set(re.findall(r"`(rft bench [^`]*)`", ROWS)))


def test_every_benchmark_of_a_table_exists_with_its_options() -> None:
    assert len(COMMANDS) > 15
    sources = "".join(path.read_text(encoding="utf-8") for path in (CHECKOUT / "benchmarks").rglob("*.py"))
    for command in COMMANDS:
        name, *options = command.removeprefix("rft bench ").split()
        assert name in BENCHMARKS, command
        for option in options:
            assert not option.startswith("--") or f'"{option}"' in sources, f"{command}: {option}"


def test_every_log_is_linked() -> None:
    linked = set(re.findall(r"\(measurements/([\w-]+)\.md\)", PAGE))
    assert linked == {path.stem for path in (CHECKOUT / "docs" / "measurements").glob("*.md")}
