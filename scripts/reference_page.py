"""Write generated files of docs/reference, or with `--check` compare them with what would be written."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "reference"


def main(pages: Mapping[Path, Callable[[], str]], description: str | None) -> int:
    """Run the command line of a script that generates pages; return the exit code, 1 if `--check` found a difference."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help="compare only")
    check = parser.parse_args().check
    code = 0
    for page, render in pages.items():
        text, place = render(), page.relative_to(ROOT)
        if not check:
            page.write_text(text, encoding="utf-8")
            print(f"wrote {place}")
        elif not page.is_file() or page.read_text(encoding="utf-8") != text:
            print(f"{place} is out of date; run: make docs", file=sys.stderr)
            code = 1
    return code
