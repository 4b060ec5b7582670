"""A run outlives the pipe that it prints to, and other verbs end; a terminal that is closed: tests/acceptance/test_signals.py."""

from __future__ import annotations

import subprocess
import sys

from rftcore.cli import EXIT_DEFECT

PROGRAM = """
import sys
from rftcore.launch.views import LineView

view = LineView()
for number in range(2000):
    view.message(f"line {number} " + "." * 100)
print("what is printed at the end", flush=True)
sys.stderr.write("continue it")
"""


def test_messages_end_where_nothing_reads_them() -> None:
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
