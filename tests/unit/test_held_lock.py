"""A command that leaves forked children behind ends, and still prints what held the interpreter's lock for good."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# `libc.fork` is the fork of C code, of which the interpreter learns nothing.
SCRIPT = """
import ctypes, os, re, sys, time
from rftdata.user_code import held_lock, held_lock_timer, time_limits

time_limits.GRACE_S = held_lock_timer.SLACK_S = 0.2
fork = os.fork if sys.argv[1] == "fork" else ctypes.CDLL(None).fork
with held_lock.printed():
    child = fork()
    if child == 0:
        os.close(1), os.close(2)
        time.sleep(120)
        os._exit(0)
    print(child, flush=True)
    if sys.argv[2] == "blocked":
        time_limits.call(lambda: re.match(r"(a+)+$", "a" * 60 + "b"), 0.2, "the stage 'backtracks'")
print("continued", flush=True)
"""


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SCRIPT, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    os.kill(int(done.stdout.split()[0]), 9)
    return done


@pytest.mark.parametrize("how", ["fork", "c"])
def test_a_command_ends_though_a_forked_child_lives_on(how: str) -> None:
    done = run_script(how, "quick")
    assert done.returncode == 0 and "continued" in done.stdout


def test_what_holds_the_lock_is_printed_though_a_forked_child_lives_on() -> None:
    done = run_script("fork", "blocked")
    assert done.returncode == 1
    assert "rft: the stage 'backtracks' did not return within 0.2 s, and no other thread" in done.stderr
