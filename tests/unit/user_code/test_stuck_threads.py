"""The exit code of a process that has left a thread to a call that hangs."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys, threading
from rftcore import cli, stuck_threads
from rftcore.launch.local_processes.forked_process import exit_after

thread = threading.Thread(target=threading.Event().wait, daemon=True)
thread.start()
assert not stuck_threads.leave(thread, 0.0)
sys.argv = ["rft"]
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("exit_after(lambda: sys.exit(143))", 143),
        ("sys.argv.append('--version'); cli.main()", 0),
        ("raise ValueError", 1),
    ],
)
def test_a_stuck_thread_does_not_change_the_exit_code(end: str, code: int) -> None:
    assert subprocess.run([sys.executable, "-c", PROGRAM + end], capture_output=True, check=False).returncode == code
