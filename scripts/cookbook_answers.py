"""Write the answers of a buffer into docs/cookbook.md: `scripts/cookbook_answers.py BUFFER`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cookbook.md"
QUESTION = re.compile(r"^## (.+?)\n.*?```sql\n(.*?)```\n\n```text\n(.*?)```\n", re.DOTALL | re.MULTILINE)


def main(buffer: str) -> None:
    text = PAGE.read_text(encoding="utf-8")
    for found in reversed(list(QUESTION.finditer(text))):
        rft = [Path(sys.executable).with_name("rft"), "sql", "--buffer", buffer, found[2]]
        answer = subprocess.run(rft, check=True, capture_output=True, text=True).stdout
        lines = "".join(f"{line.rstrip()}\n" for line in answer.splitlines())
        text = text[: found.start(3)] + lines + text[found.end(3) :]
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
