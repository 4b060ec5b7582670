"""Nothing in the repository names the machine it was written on, or where that machine fetches packages from."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
HOME = re.compile(r"(?<![\w.])/(?:home|Users)/[A-Za-z0-9_-]+/|(?<![\w.])/root/\w")
PACKAGE_ADDRESS = re.compile(r"(?:https?|file)://[^\s\"'<>]*(?:/simple\b|\.whl\b)")


def tracked_texts() -> list[tuple[str, str]]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True).stdout.splitlines()
    texts = []
    for name in names:
        path = CHECKOUT / name
        if path.is_file() and path != Path(__file__).resolve() and b"\0" not in (content := path.read_bytes()):
            texts.append((name, content.decode("utf-8", errors="replace")))
    return texts


def test_no_file_holds_a_home_folder_this_checkouts_path_or_a_package_address() -> None:
    found = []
    for name, text in tracked_texts():
        for number, line in enumerate(text.splitlines(), start=1):
            if HOME.search(line) or PACKAGE_ADDRESS.search(line) or f"{CHECKOUT}/" in line:
                found.append(f"{name}:{number}: {line.strip()[:120]}")
    assert found == []
