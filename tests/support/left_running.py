"""A test that a session is interrupted in, for `tests/store/postgres/test_session_processes.py`; no session collects it by itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rftdata.postgres.embedded import EmbeddedServer
from tests.support.preloaded import Preloaded


@pytest.mark.timeout(600)
def test_that_does_not_end(server_folders: Path, tmp_path: Path) -> None:
    EmbeddedServer(server_folders / "left").start()
    apart = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
    forked = Preloaded(["sql", "--buffer", server_folders / "left", "select pg_sleep(1000)"], start_new_session=True)
    print(f"running {apart.pid} {forked.pid} {server_folders}", file=sys.__stderr__, flush=True)
    forked.wait()
