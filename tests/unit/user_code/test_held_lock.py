"""A command that leaves forked children behind ends, and still prints what held the interpreter's lock for good."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rftdata.processes import process_lives
from tests.support.waiting import PATIENCE_S, wait_until_ended

# `libc.fork` is the fork of C code, which the interpreter does not notice. The child lives until the test closes its input.
SCRIPT = """
import ctypes, os, re, sys
from rftdata.user_code import held_lock, held_lock_timer, time_limits

time_limits.GRACE_S = held_lock_timer.SLACK_S = 0.2
fork = os.fork if sys.argv[1] == "fork" else ctypes.CDLL(None).fork
backtracks = re.compile(r"(a+)+$").match
with held_lock.printed():
    child = fork()
    if child == 0:
        os.close(1), os.close(2)
        os.read(0, 1)
        os._exit(0)
    print(child, flush=True)
    if sys.argv[2] == "blocked":
        time_limits.call(lambda: backtracks("a" * 60 + "b"), 1, "the stage 'backtracks'")
print("continued", flush=True)
"""


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SCRIPT, *arguments]
    read, write = os.pipe()
    try:
        done = subprocess.run(command, stdin=read, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        child = int(done.stdout.split()[0])
        assert process_lives(child)
    finally:
        os.close(read)
        os.close(write)
    wait_until_ended([child])
    return done


@pytest.mark.parametrize("how", ["fork", "c"])
def test_a_command_ends_though_a_forked_child_survives(how: str) -> None:
    done = run_script(how, "quick")
    assert done.returncode == 0 and "continued" in done.stdout


def test_the_call_that_holds_the_lock_is_printed_though_a_forked_child_survives() -> None:
    done = run_script("fork", "blocked")
    assert done.returncode == 1
    assert "rft: the stage 'backtracks' did not return within 1 s, and no other thread" in done.stderr
