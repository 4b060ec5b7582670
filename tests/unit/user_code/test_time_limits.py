"""A function that does not return is stopped, or its process ends with a report; nothing is raised outside the call."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import duckdb
import pytest

from rftdata.errors import TimeLimitError, time_limit_behind
from rftdata.user_code import time_limits
from tests.support.waiting import PATIENCE_S

ENDLESS = "SELECT count(*) FROM range(1000000000000)"
NUM_LATE = 1500


def spin() -> None:
    while True:
        pass


def count_for_ever() -> Iterator[int]:
    number = 0
    while True:
        number += 1
        if number > 3:
            spin()
        yield number


def test_a_loop_is_stopped_and_the_error_names_limit_subject_and_place() -> None:
    def work() -> None:
        limited = time_limits.current()
        assert limited is not None
        limited.noun, limited.items, limited.position = "experience", [5, 7], 1
        spin()

    with pytest.raises(TimeLimitError) as raised:
        time_limits.call(work, 1.0, "the stage './rules.py:f'")
    error = raised.value
    assert "the stage './rules.py:f' did not return for experience 7 within 1 s" in str(error)
    assert "test_time_limits.py, line" in str(error) and ", in spin" in str(error)
    assert "in spin" in error.stack and "in call" not in error.stack
    assert (error.subject, error.num_done, error.blocked) == (7, 1, False)
    assert time_limits.current() is None


def test_what_a_function_returns_or_raises_passes_through() -> None:
    def fail() -> None:
        raise ValueError("its own")

    assert time_limits.call(lambda: 3, 60, "it") == 3
    with pytest.raises(ValueError, match="its own"):
        time_limits.call(fail, 60, "it")


def test_a_query_of_duckdb_is_interrupted_and_its_connection_stays_usable() -> None:
    with contextlib.closing(duckdb.connect()) as connection:

        def ask() -> None:
            with time_limits.interruptible(connection.interrupt):
                connection.execute(ENDLESS)

        with pytest.raises(TimeLimitError):
            time_limits.call(ask, 0.1, "the query")
        assert connection.execute("SELECT 1").fetchall() == [(1,)]


def test_a_function_that_catches_the_exception_has_exceeded_its_limit_all_the_same() -> None:
    def stubborn() -> str:
        with contextlib.suppress(BaseException):
            spin()
        return "done"

    with pytest.raises(TimeLimitError):
        time_limits.call(stubborn, 0.05, "it")


def test_the_limit_around_a_call_ends_it_and_a_limit_within_leaves_the_outer_one_alone() -> None:
    with pytest.raises(TimeLimitError, match="the outer"):
        time_limits.call(lambda: time_limits.call(spin, 60, "the inner"), 0.05, "the outer")

    def continues() -> str:
        with pytest.raises(TimeLimitError, match="the inner"):
            time_limits.call(spin, 0.05, "the inner")
        return "continued"

    assert time_limits.call(continues, 60, "the outer") == "continued"


def test_each_row_of_a_generator_has_the_limit_and_objects_stay_in_their_thread() -> None:
    rows = count_for_ever()
    assert [time_limits.call(lambda: next(rows), 60, "it") for _ in range(3)] == [1, 2, 3]
    with pytest.raises(TimeLimitError):
        time_limits.call(lambda: next(rows), 0.05, "it")
    assert time_limits.call(threading.get_ident, 60, "it") == threading.get_ident()


def test_a_command_lowers_limits_and_reports_it_and_leaves_lower_ones() -> None:
    with time_limits.at_most(0.05, "rft check"):
        with pytest.raises(TimeLimitError, match=r"rft check waits 0\.05 s at most, and a run 600 s"):
            time_limits.call(spin, 600, "it")
        with pytest.raises(TimeLimitError, match=r"within 0\.01 s.*or raise its timeout_s"):
            time_limits.call(spin, 0.01, "it")


def test_the_error_survives_pickling_and_is_found_behind_others() -> None:
    import pickle

    error = TimeLimitError("it did not return", stack="the stack", blocked=True, subject=7)
    copy = pickle.loads(pickle.dumps(error.about("stage 1")))
    assert (str(copy), copy.stack, copy.blocked, copy.subject) == (
        "stage 1: it did not return.",
        "the stack",
        True,
        7,
    )
    outer = ValueError("outer")
    outer.__cause__ = error
    assert time_limit_behind(outer) is error and time_limit_behind(ValueError()) is None


def _work_of(length_s: float) -> Callable[[], int]:
    def work() -> int:
        end, number = time.perf_counter() + length_s, 0
        while time.perf_counter() < end:
            number += 1
        return number

    return work


def test_a_late_exception_never_reaches_the_code_around_the_call() -> None:
    """Calls that end just when their limit passes, in several threads: every time either a result or a TimeLimitError."""
    limit_s, until = 0.002, time.monotonic() + PATIENCE_S
    found = [{"returned": 0, "stopped": 0} for _ in range(3)]
    leaked: list[BaseException] = []

    def is_enough() -> bool:
        stopped, returned = (sum(each[outcome] for each in found) for outcome in ("stopped", "returned"))
        return min(stopped, returned) >= 20 and stopped + returned >= NUM_LATE

    def hammer(thread: int) -> None:
        number = thread
        try:
            while not is_enough() and time.monotonic() < until:
                number = (number * 1103515245 + 12345) % 2**31
                length_s = limit_s * (0.8 + 0.4 * (number / 2**31))
                try:
                    time_limits.call(_work_of(length_s), limit_s, "it")
                    found[thread]["returned"] += 1
                except TimeLimitError:
                    found[thread]["stopped"] += 1
                # Where an exception would come late: many instructions outside of any limit.
                sum(one * one for one in range(200))
        except BaseException as error:  # noqa: BLE001 - this is what is looked for
            leaked.append(error)

    threads = [threading.Thread(target=hammer, args=(thread,)) for thread in range(len(found))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert leaked == []
    assert is_enough(), found


def test_a_forked_child_has_limits_of_its_own() -> None:
    # In a process of its own, whose only other thread is the watcher: a forked child waits forever for the locks of others.
    script = """
import os, signal
from rftdata.errors import TimeLimitError
from rftdata.user_code import time_limits

def is_stopped():
    def spin():
        while True:
            pass
    try:
        time_limits.call(spin, 0.05, "it")
    except TimeLimitError:
        return True

time_limits.call(lambda: None, 600, "it")  # the watcher and its timer are there
child = os.fork()
if child == 0:
    signal.alarm(600)  # ends a child that hangs
    os._exit(7 if is_stopped() else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), is_stopped())
"""
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.stdout, done.stderr) == ("7 True\n", "")


# What blocks a process: a call that sleeps in C, and one that holds the interpreter's lock.
SCRIPT = """
import ctypes, re, sys
from pathlib import Path
from rftdata.user_code import held_lock_timer, time_limits

time_limits.GRACE_S = held_lock_timer.SLACK_S = 0.2
if len(sys.argv) > 2:
    held_lock_timer.report_stacks_to(Path(sys.argv[2]))

libc = ctypes.CDLL(None)

def sleeps():
    libc.sleep(600)

def backtracks():
    re.match(r"(a+)+$", "a" * 60 + "b")

def own_handler(error):
    import os
    os.write(2, f"HANDLED {error.blocked} {error.stack}".encode())
    os._exit(42)

time_limits.call(lambda: None, 600, "an earlier call")
if sys.argv[1] == "handled":
    with time_limits.when_blocked(own_handler):
        time_limits.call(sleeps, 1.0, "the stage 'sleeps' on experiences 1-4")
time_limits.call(globals()[sys.argv[1]], 1.0, f"the stage {sys.argv[1]!r} on experiences 1-4")
"""


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


def test_a_process_that_is_blocked_in_c_prints_sentence_and_stack_and_ends() -> None:
    done = run_script("sleeps")
    assert done.returncode == 1
    assert (
        "rft: the stage 'sleeps' on experiences 1-4 did not return within 1 s and could not be stopped" in done.stderr
    )
    assert "in sleeps" in done.stderr


def test_a_role_reports_the_blocking_call_to_its_run() -> None:
    done = run_script("handled")
    assert done.returncode == 42
    assert "HANDLED True" in done.stderr and "in sleeps" in done.stderr


def test_code_that_holds_the_interpreters_lock_ends_the_process_with_a_report(tmp_path: Path) -> None:
    report = tmp_path / "stacks" / "report.txt"
    done = run_script("backtracks", str(report))
    assert done.returncode == 1
    sentence, _, stack = report.read_text().partition("\n")
    assert sentence.rstrip() == (
        "the stage 'backtracks' on experiences 1-4 did not return within 1 s, and no other thread of the process could run"
    )
    assert "in backtracks" in stack


def test_a_timer_that_was_handed_over_is_neither_set_nor_cancelled() -> None:
    script = """
import faulthandler, time
from rftdata.user_code import held_lock_timer, time_limits

time_limits._IDLE_S = time_limits._HEARTBEAT_S = 0.05
time_limits.call(lambda: None, 600, "an earlier call")
held_lock_timer.hand_over()
faulthandler.dump_traceback_later(2, exit=True)
time_limits.call(lambda: None, 600, "a later call")
time.sleep(20)
print("the timer did not fire")
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stdout) == (1, "") and "Timeout" in done.stderr
