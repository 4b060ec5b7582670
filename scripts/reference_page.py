"""Write a generated page of docs/reference, or with `--check` compare it with what would be written."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "reference"


def main(page: Path, render: Callable[[], str], description: str | None) -> int:
    """Run the command line of a script that generates `page`; return the exit code, 1 if `--check` found a difference."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help="compare only")
    check = parser.parse_args().check
    text, place = render(), page.relative_to(ROOT)
    if check:
        is_current = page.is_file() and page.read_text(encoding="utf-8") == text
        if not is_current:
            print(f"{place} is out of date; run: make docs", file=sys.stderr)
        return int(not is_current)
    page.write_text(text, encoding="utf-8")
    print(f"wrote {place}")
    return 0
