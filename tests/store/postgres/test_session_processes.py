"""The end of a test session finds what its tests started, and nothing else, and ends it, also when the session is interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rftdata.postgres.embedded import EmbeddedServer
from tests.support import session_processes
from tests.support.command_line import CHECKOUT
from tests.support.waiting import PATIENCE_S, wait_until

NEVER_ENDING = "tests/support/left_running.py"

PROGRAM = "import sys; from pathlib import Path; from rftdata.postgres.embedded import EmbeddedServer as S; S(Path(sys.argv[1])).start()"


@pytest.fixture
def folder(server_folders: Path) -> Path:
    return server_folders / "left"


def test_a_server_that_a_command_left_running_is_found_and_stopped(folder: Path) -> None:
    subprocess.run([sys.executable, "-c", PROGRAM, folder], check=True)
    server = EmbeddedServer(folder)
    (found,) = [process for process in session_processes.servers() if process.cwd() == str(server.data)]
    assert session_processes.stop([found]) == []
    assert not server.is_running()


def test_a_server_of_another_session_is_left_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = EmbeddedServer(folder)
    try:
        server.start()
        ours = {process.cwd() for process in session_processes.servers()}
        monkeypatch.setenv("RFT_TEST_SESSION", os.environ["RFT_TEST_SESSION"] + "-another")
        assert str(server.data) in ours and session_processes.servers() == []
    finally:
        server.stop()


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_an_interrupted_session_leaves_no_process_and_no_folder(number: signal.Signals, tmp_path: Path) -> None:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("RFT_TEST_SESSION", "PYTEST_"))
    }
    session = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "pytest",
            "-n",
            "1",
            "--basetemp",
            tmp_path / "session",
            "--capture",
            "no",
            NEVER_ENDING,
        ],
        cwd=CHECKOUT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert session.stdout is not None
    read = []
    for line in session.stdout:
        read.append(line)
        if "running " in line:
            break
    else:
        pytest.fail("".join(read))
    *pids, folder = line.partition("running ")[2].split()
    mark = psutil.Process(int(pids[0])).environ()["RFT_TEST_SESSION"]
    assert mark != os.environ["RFT_TEST_SESSION"]
    if number is signal.SIGINT:  # as from a terminal
        os.killpg(session.pid, number)
    else:
        session.send_signal(number)
    session.communicate(timeout=PATIENCE_S)
    wait_until(lambda: session_processes.processes(mark) == [], "the end of the session's processes")
    wait_until(lambda: not Path(folder).exists(), "the end of its folders")
