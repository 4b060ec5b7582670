"""Seconds that the long test files take, for their order (`pytest_collection_modifyitems`). A file that is missing counts as short.

Measured by `make test PYTEST_ARGS=--durations=0`, rounded; only their order matters.
"""

from __future__ import annotations

from pathlib import Path

_TESTS = Path(__file__).resolve().parents[1]
_SECONDS: dict[str, int] = {}


def of_file(path: Path) -> int:
    """Seconds of a test file's tests."""
    return _SECONDS.get(path.relative_to(_TESTS).as_posix(), 0)
