"""An exception for a call reaches that call or nothing: neither the code after it, nor a thread that has its identifier now."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator

import pytest

from rftdata.user_code.async_raise import RunningCall
from tests.support.waiting import PATIENCE_S, wait_until

# Of what has to happen by chance at the level of instructions, each test waits until it has happened so often.
OFTEN = 1000


class InterruptedForTestError(BaseException):
    """What is raised in calls here."""


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Threads that alternate often, so that exceptions arrive at many instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def _spin(length_s: float) -> str:
    end = time.perf_counter() + length_s
    while time.perf_counter() < end:
        pass
    return "returned"


def test_a_running_call_is_interrupted_and_shows_its_stack_until_it_ends() -> None:
    call, begun, found = RunningCall(), threading.Event(), list[BaseException]()

    def endless() -> None:
        begun.set()
        while True:
            pass

    def run() -> None:
        try:
            call.run(endless)
        except InterruptedForTestError as error:
            found.append(error)

    call.interrupt(InterruptedForTestError)  # not begun
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    begun.wait()
    assert "endless" in [frame.name for frame in call.stack()] and not call.has_ended
    call.interrupt(InterruptedForTestError)
    thread.join()
    assert len(found) == 1 and call.has_ended and list(call.stack()) == []


def test_a_thread_that_has_the_identifier_of_an_ended_call_is_not_interrupted() -> None:
    reused, leaked = 0, list[BaseException]()
    release = threading.Event()

    def innocent() -> None:
        try:
            release.wait()
            _spin(0.0002)
        except BaseException as error:  # noqa: BLE001 - this is what is looked for
            leaked.append(error)

    deadline = time.monotonic() + PATIENCE_S
    while reused < 20 and time.monotonic() < deadline:
        call = RunningCall()
        ended = threading.Thread(target=call.run, args=(lambda: None,))
        ended.start()
        ended.join()
        time.sleep(0.001)  # the system frees the identifier of a joined thread a moment later, at times later than this
        release.clear()
        others = [threading.Thread(target=innocent) for _ in range(4)]
        for other in others:
            other.start()
        reused += ended.ident in [other.ident for other in others]
        call.interrupt(InterruptedForTestError)
        release.set()
        for other in others:
            other.join()
    assert leaked == [] and reused == 20


@pytest.mark.usefixtures("quick_switches")
def test_a_late_exception_never_reaches_the_code_after_the_call() -> None:
    """Short calls, one after the other, and a thread that interrupts the newest of each again and again."""
    found, leaked = {"returned": 0, "interrupted": 0}, list[BaseException]()
    newest = [RunningCall() for _ in range(2)]
    done, deadline = threading.Event(), time.monotonic() + PATIENCE_S

    def hammer(number: int) -> None:
        try:
            while not done.is_set():
                newest[number] = call = RunningCall()
                try:
                    call.run(lambda: _spin(0.0002))
                    found["returned"] += 1
                except InterruptedForTestError:
                    found["interrupted"] += 1
                # Where an exception would come late: many instructions outside of any call.
                sum(one * one for one in range(200))
        except BaseException as error:  # noqa: BLE001 - this is what is looked for
            leaked.append(error)

    threads = [threading.Thread(target=hammer, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    while min(found.values()) < OFTEN and not leaked and time.monotonic() < deadline:
        for call in list(newest):
            call.interrupt(InterruptedForTestError)
        time.sleep(0.0003)
    done.set()
    for thread in threads:
        thread.join()
    assert leaked == []
    assert min(found.values()) >= OFTEN, found


def test_a_pending_exception_can_be_cancelled() -> None:
    call, found, gate = RunningCall(), list[str](), threading.Lock()

    def work() -> str:
        gate.acquire()
        return "returned"

    gate.acquire()
    thread = threading.Thread(target=lambda: found.append(call.run(work)), daemon=True)
    thread.start()
    # In C code, where no exception is raised.
    wait_until(lambda: [frame.line for frame in call.stack()][-1:] == ["gate.acquire()"])
    call.interrupt(InterruptedForTestError)
    call.interrupt(None)
    gate.release()
    thread.join()
    assert found == ["returned"]
