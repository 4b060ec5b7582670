"""Statements of benchmarks, in the SQL file beside the module that uses them."""

from __future__ import annotations

import re
from pathlib import Path


def statements(module: str) -> dict[str, str]:
    """Return the statements of the SQL file beside a module (`__file__`), by name."""
    text = Path(module).with_suffix(".sql").read_text(encoding="utf-8")
    blocks = re.split(r"^-- name: ", text, flags=re.MULTILINE)[1:]
    return {block.partition("\n")[0]: block.partition("\n")[2].rstrip().rstrip(";") for block in blocks}
