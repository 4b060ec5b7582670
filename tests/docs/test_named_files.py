"""Files of the repository that a page names by their path exist. Logs of measurements may name files of their commit."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
NAMED = re.compile(
    r"`((?:rftdata|operators|rftcore|tests|scripts|benchmarks|sql)/[\w./-]+\.(?:py|sql|yaml|json|txt))(?:::[\w…]+)?`"
)


def test_every_file_that_a_page_names_exists() -> None:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    listed = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True).stdout.split()
    pages = [name for name in listed if not name.startswith("docs/measurements/") and (CHECKOUT / name).is_file()]
    named = [(page, path) for page in pages for path in NAMED.findall((CHECKOUT / page).read_text(encoding="utf-8"))]
    assert len(named) > 40
    assert [f"{page}: {path}" for page, path in named if not (CHECKOUT / path).is_file()] == []
