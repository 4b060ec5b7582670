"""The end of a test session finds every embedded server that its tests started, and no other, and stops it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rftdata.postgres.embedded import EmbeddedServer
from tests.support import servers

PROGRAM = "import sys; from pathlib import Path; from rftdata.postgres.embedded import EmbeddedServer as S; S(Path(sys.argv[1])).start()"


@pytest.fixture
def folder(server_folders: Path) -> Path:
    return server_folders / "left"


def test_a_server_that_a_command_left_running_is_found_and_stopped(folder: Path) -> None:
    subprocess.run([sys.executable, "-c", PROGRAM, folder], check=True)
    server = EmbeddedServer(folder)
    (found,) = [process for process in servers.started() if process.cwd() == str(server.data)]
    assert servers.stop([found]) == []
    assert not server.is_running()


def test_a_server_of_another_session_is_left_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = EmbeddedServer(folder)
    try:
        server.start()
        ours = {process.cwd() for process in servers.started()}
        monkeypatch.setenv("RFT_TEST_SESSION", os.environ["RFT_TEST_SESSION"] + "-another")
        assert str(server.data) in ours and servers.started() == []
    finally:
        server.stop()
