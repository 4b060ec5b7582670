"""The annotations of the whole code: mypy takes a minute of one core, so it runs beside the other tests instead of before them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_mypy_finds_nothing() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "mypy"], cwd=Path(__file__).parents[2], capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout + found.stderr
