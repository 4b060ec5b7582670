"""A crash at every failpoint: acknowledged data is kept, nothing is trained twice, and the run continues."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rftdata.failpoints import FAILPOINTS, arm

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_crash_at_every_failpoint(server_folders: Path) -> None:
    folder = server_folders / "failpoints"
    folder.mkdir()
    program = [sys.executable, "-m", "tests.crash.every_failpoint", str(folder)]
    done = subprocess.run(program, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    of_roles = [name for name in FAILPOINTS if not name.startswith(("archive.", "restore."))]
    assert f"{len(of_roles)} failpoints" in done.stdout


def test_an_unknown_failpoint_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown failpoint 'writer\.nowhere'; allowed: writer\.appended"):
        arm("writer.nowhere")
