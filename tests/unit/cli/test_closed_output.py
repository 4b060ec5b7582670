"""A run continues after the pipe that it prints to is closed, and other verbs end. For terminals see tests/acceptance/test_signals.py."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rftcore.cli import EXIT_DEFECT
from rftdata.postgres.embedded import EmbeddedServer
from tests.support.command_line import CHECKOUT

PROGRAM = """
import sys
from rftcore.launch.terminal.views import LineView

view = LineView()
for number in range(2000):
    view.message(f"line {number} " + "." * 100)
print("what is printed at the end", flush=True)
sys.stderr.write("continue it")
"""


def test_nothing_is_printed_any_more_after_the_reader_has_closed_the_pipe() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().startswith("line 0")
        process.stdout.close()
        assert process.stderr.read() == "continue it"
    assert process.returncode == 0


DEFECT = """
from rftcore import cli

@cli.app.command("lost")
def lost() -> None:
    raise BrokenPipeError(32, "a worker process has ended")

raise SystemExit(cli.run_command(["lost"]))
"""


def test_a_broken_pipe_to_another_process_is_not_the_reader_of_the_output() -> None:
    done = subprocess.run([sys.executable, "-c", DEFECT], capture_output=True, text=True, check=False)
    assert done.returncode == EXIT_DEFECT and "a worker process has ended" in done.stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_command_works_without_standard_files(closed: str, tmp_path: Path) -> None:
    command = f'exec "{sys.executable}" -m rftcore check "{CHECKOUT}/examples/sort_from_scratch/sft.yaml" --set model.path=somebody/model {closed}'
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert (done.stdout == "") == (">&-" in closed.replace("2>&-", ""))


def test_a_command_works_under_a_parent_that_ignores_ends_of_children(server_folders: Path) -> None:
    command = [sys.executable, "-m", "rftcore", "db", "create", "--buffer", server_folders / "ignored"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN),
    )
    assert done.returncode == 0, done.stderr
    EmbeddedServer(server_folders / "ignored").stop()
