"""A process that a function of the user blocks ends itself and leaves a report of what blocked it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from rftdata.processes import pid_space
from rftdata.user_code import blocked_process
from tests.support.waiting import PATIENCE_S

# The main thread does not return; another thread ends the process.
BLOCKED = """
import atexit, sys, threading, time
from pathlib import Path
from rftdata.user_code import blocked_process

blocked_process.report_to(Path(sys.argv[1]))
if sys.argv[2:]:
    Path(sys.argv[1], "stacks").write_text(sys.argv[2])
atexit.register(print, "a handler ran")

def end():
    blocked_process.end_blocked_process("the reward 'slow'\\n blocks on task sums/7", "File reward.py, line 3\\n")

threading.Thread(target=end).start()
time.sleep(160)
"""


def end_in_a_process(run_folder: Path, *obstacle: str) -> tuple[subprocess.Popen[str], str, str]:
    process = subprocess.Popen(
        [sys.executable, "-c", BLOCKED, str(run_folder), *obstacle],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    out, error = process.communicate(timeout=PATIENCE_S)
    return process, out, error


def test_it_exits_with_its_own_code_and_reports_a_sentence_and_the_stack(tmp_path: Path) -> None:
    process, out, error = end_in_a_process(tmp_path)

    assert process.returncode == blocked_process.EXIT_CODE
    assert out == ""  # nothing that could wait for the blocked thread ran
    sentence, stack = "the reward 'slow' blocks on task sums/7", "File reward.py, line 3\n"
    assert blocked_process.read_report(tmp_path, process.pid) == (sentence, stack)
    report = tmp_path / "stacks" / f"{os.uname().nodename}-{pid_space()}-{process.pid}.blocked.txt"
    assert report.read_text() == f"{sentence}\n{stack}"
    assert sentence in error


def test_a_call_that_blocks_a_role_outside_its_items_is_reported_to_its_run(tmp_path: Path) -> None:
    script = """
import sys, time
from pathlib import Path
from rftdata.user_code import blocked_process
from rftdata.user_code import time_limits

time_limits.GRACE_S = 0.2
blocked_process.report_to(Path(sys.argv[1]))
time_limits.call(lambda: time.sleep(600), 0.2, "`prepare` of stage 1 of the pipeline (mine)")
"""
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stderr=subprocess.PIPE, text=True)
    _, error = process.communicate(timeout=PATIENCE_S)

    assert process.returncode == blocked_process.EXIT_CODE
    report = blocked_process.read_report(tmp_path, process.pid)
    assert report is not None
    assert report[0].startswith("`prepare` of stage 1 of the pipeline (mine) did not return within 0.2 s and could not")
    assert report[0] in error


def test_a_report_that_cannot_be_written_does_not_keep_the_process(tmp_path: Path) -> None:
    process, _, error = end_in_a_process(tmp_path, "a file where the folder would be")

    assert process.returncode == blocked_process.EXIT_CODE
    assert "the reward 'slow' blocks on task sums/7" in error


def test_no_report_is_found_for_a_process_that_left_none_or_was_not_blocked(tmp_path: Path) -> None:
    assert blocked_process.read_report(tmp_path, 12345) is None
    path = blocked_process.report_path(tmp_path, 12345)
    path.parent.mkdir()
    path.write_text("what it would say if the next call blocked it".ljust(100) + "\n")
    assert blocked_process.read_report(tmp_path, 12345) is None
