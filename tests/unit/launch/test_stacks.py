"""Stacks of a process: from a thread of it that holds the interpreter's lock, and from a signal handler only where the lock is not free."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rftcore.run import stacks
from rftcore.run.stacks import WITHOUT_LOCK, read_stacks
from rftcore.run.thread_times import ThreadTimes
from tests.support.waiting import PATIENCE_S, wait_until

PROGRAM = """
import pathlib, re, signal, sys, threading, time
from rftcore.run.stacks import answer_requests

folder = pathlib.Path(sys.argv[1])
for run in sys.argv[3:]:
    answer_requests(folder / run)

def churn(depth):
    return churn(depth - 1) if depth else None

def busy():
    while True:
        churn(50)

def signalled(*_):
    (folder / "signalled").touch()

def match_for_long():
    (folder / "begun").touch()
    re.match("(a+)+$", "a" * 64 + "b")

numbers = [hash(str(number)) for number in range(300_000)]
all_sort = threading.Event()

def sort_for_long():
    all_sort.wait()
    while True:
        sorted(numbers)

match sys.argv[2]:
    case "busy":
        signal.signal(signal.SIGUSR1, signalled)
        for _ in range(3):
            threading.Thread(target=busy, daemon=True).start()
        (folder / "begun").touch()
        time.sleep(600)
    case "locked":
        match_for_long()
    case "locked in a thread":
        thread = threading.Thread(target=match_for_long)
        thread.start()
        thread.join()
    case "turns":
        signal.signal(signal.SIGUSR1, signalled)
        for _ in range(16):
            threading.Thread(target=sort_for_long, daemon=True).start()
        (folder / "begun").touch()
        all_sort.set()
        time.sleep(600)
"""
Begin = Callable[..., int]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Starts a program that works in the way of a name, with runs whose folders have these names; returns its process id."""
    started: list[subprocess.Popen[bytes]] = []

    def start(way: str, *runs: str) -> int:
        started.append(subprocess.Popen([sys.executable, "-c", PROGRAM, tmp_path, way, *runs]))
        wait_until((tmp_path / "begun").exists, "the program works")
        return started[0].pid

    yield start
    for process in started:
        assert process.poll() is None, "it still works"
        process.kill()
        assert process.wait(PATIENCE_S) == -signal.SIGKILL


def test_running_threads_are_not_interrupted(begin: Begin, tmp_path: Path) -> None:
    pid = begin("busy", "run")
    for _ in range(20):
        text = read_stacks(tmp_path / "run", [pid])[pid]
        assert text.count("in busy") == 3 and WITHOUT_LOCK not in text
        assert "in _serve" not in text, "the thread that answers is left out"
    assert not (tmp_path / "signalled").exists()


def test_a_process_that_works_for_one_run_after_the_other_answers_for_both(begin: Begin, tmp_path: Path) -> None:
    pid = begin("busy", "first", "second")
    for run in ("first", "second"):
        assert "in busy" in read_stacks(tmp_path / run, [pid])[pid]


def test_threads_that_take_the_lock_in_turn_for_long_are_not_interrupted(
    begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "LOCK_S", 0.5)
    monkeypatch.setattr(stacks, "BUSY_S", PATIENCE_S)
    pid = begin("turns", "run")
    for _ in range(2):
        text = read_stacks(tmp_path / "run", [pid])[pid]
        assert text.count("in sort_for_long") == 16 and WITHOUT_LOCK not in text
    assert not (tmp_path / "signalled").exists()


def test_a_signal_handler_writes_where_the_lock_is_held_and_that_is_reported(
    begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "LOCK_S", 0.5)
    pid = begin("locked", "run")
    text = read_stacks(tmp_path / "run", [pid])[pid]
    assert re.match(f"{WITHOUT_LOCK} was not free for [1-9][0-9]* s .*: code below holds it", text)
    assert "re/__init__.py" in text and "in match" in text and "Other threads: " in text


def test_a_signal_handler_writes_the_stack_of_its_own_thread_alone(
    begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "LOCK_S", 0.5)
    pid = begin("locked in a thread", "run")
    main_thread, holder = read_stacks(tmp_path / "run", [pid])[pid].split("\n\n")[1:3]
    assert main_thread.startswith(f"Thread {pid} ") and "<module>" in main_thread and "in match" not in main_thread
    assert "in match" in holder and "in match_for_long" in holder and "<module>" not in holder


@pytest.mark.parametrize(("way", "take_turns"), [("locked in a thread", False), ("turns", True)])
def test_threads_that_take_turns_are_told_from_one_that_keeps_the_lock(
    begin: Begin, tmp_path: Path, *, way: str, take_turns: bool
) -> None:
    pid = begin(way, "run")
    times = ThreadTimes(pid)
    for _ in range(6):
        time.sleep(0.25)
        times.look()
    assert (times.num_working(PATIENCE_S) > 1) == take_turns
    main_thread, first, *rest = times.threads()
    assert main_thread.thread_id == pid and first.used_s > 0 and all(other.used_s <= first.used_s for other in rest)


def test_a_suspended_process_is_not_signalled(begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "LOCK_S", 0.5)
    pid = begin("busy", "run")
    os.kill(pid, signal.SIGSTOP)
    try:
        text = read_stacks(tmp_path / "run", [pid])[pid]
    finally:
        os.kill(pid, signal.SIGCONT)
    assert text.startswith(WITHOUT_LOCK) and "is suspended" in text
    assert "in busy" in read_stacks(tmp_path / "run", [pid])[pid]
    assert not (tmp_path / "signalled").exists()


def test_a_process_that_has_ended_is_left_out(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM, tmp_path, "ends", "run"], check=True)
    assert ended.returncode == 0 and read_stacks(tmp_path / "run", [2**22 + 1]) == {}
