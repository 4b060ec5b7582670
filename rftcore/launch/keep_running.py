"""`rft run --keep-running`: a process that starts `rft run`, and resumes it after an end that is not the user's.

A machine that runs out of memory, a GPU that fails, a cluster that is preempted end a run that a person would only resume. The run is a process of
its own, so that even its being killed is such an end. Final are: a finished run, a signal, a mistake that is found before the run begins (exit code
2), an end before the first trained step, and `MAX_IN_A_ROW` ends without a trained step in between. Before each resumption is a pause, which grows
while nothing is trained.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from rftcore.launch.interrupts import Interrupts
from rftdata.errors import ConfigError, RftError

MAX_IN_A_ROW = 5
_PAUSE_S = 5.0
_LONGEST_PAUSE_S = 300.0
_LOOK_S = 0.2
_FINAL = (0, ConfigError.exit_code)


def keep_running(
    first: Sequence[str], later: Sequence[str], num_steps: Callable[[], int], say: Callable[[str], None], *, pause_s: float = _PAUSE_S,
    command: Sequence[str] = (sys.executable, "-P", "-m", "rftcore", "run"),
) -> int:  # fmt: skip
    """Run `rft run` until it ends for good; return its exit code.

    Args:
        first: arguments of the first start.
        later: those that resume the run.
        num_steps: returns the steps that are trained by now.
        say: receives a line for each resumption.
        pause_s: seconds before the first resumption without progress.
        command: `rft run`.
    """
    arguments, num_in_a_row, steps = first, 0, 0
    with Interrupts() as interrupts:
        interrupts.defer()
        while True:
            code = _run([*command, *arguments], interrupts)
            if code in _FINAL or interrupts.stop:
                return code
            now = _known(num_steps, steps)
            num_in_a_row = 1 if now > steps else num_in_a_row + 1
            steps = now
            if steps == 0 or num_in_a_row >= MAX_IN_A_ROW:
                why = "no step was trained" if steps == 0 else f"{num_in_a_row} ends in a row without a trained step"
                say(f"--keep-running does not resume: {why}")
                return code
            pause = min(pause_s * 2 ** (num_in_a_row - 1), _LONGEST_PAUSE_S)
            say(f"the run ended {_how(code)} after step {steps}; --keep-running resumes it in {pause:.0f} s")
            if not _wait(pause, interrupts):
                return interrupts.exit_code
            arguments = later


def _run(command: Sequence[str], interrupts: Interrupts) -> int:
    """Start `rft run`, pass signals on to it, and return its exit code."""
    process = subprocess.Popen(command)
    passed = 0
    while True:
        try:
            return process.wait(_LOOK_S)
        except subprocess.TimeoutExpired:
            # A terminal signals both processes; what comes twice within a second counts once.
            received = [interrupts.first] * (interrupts.stop + interrupts.urgent)
            for number in received[passed:]:
                process.send_signal(number or signal.SIGTERM)
            passed = len(received)


def _known(num_steps: Callable[[], int], before: int) -> int:
    try:
        return max(before, num_steps())
    except RftError:
        return max(before, 1)  # the database does not answer: not a reason to give up


def _how(code: int) -> str:
    return f"with exit code {code}" if code >= 0 else f"by signal {-code}"


def _wait(seconds: float, interrupts: Interrupts) -> bool:
    """Wait; return False if a signal came meanwhile."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and not interrupts.stop:
        time.sleep(_LOOK_S)
    return not interrupts.stop
