"""`rft run --keep-running`: a process that starts `rft run`, and resumes it after an end that is not the user's.

A machine that runs out of memory, a GPU that fails, a cluster that is preempted end a run that a person would only resume. The run is a process of
its own, so that even its being killed is such an end. Final are: a finished run, a signal, a mistake that is found before the run begins (exit code
2), an end before the first trained step, and `MAX_IN_A_ROW` ends without a trained step in between. Before each resumption is a pause, which grows
while nothing is trained.

The run writes its name into a file when it is stored, since another run may have the configuration's name. When this process is killed, the run is
asked to stop.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rftcore.launch.interrupts import Interrupts
from rftcore.run.parent_process import end_with_parent
from rftdata.errors import ConfigError, RftError
from rftdata.files.durable import write_whole

MAX_IN_A_ROW = 5
_PAUSE_S = 5.0
_LONGEST_PAUSE_S = 300.0
_LOOK_S = 0.2
# Variables: the file into which `rft run` writes the name of its run, and the id of the process that resumes.
_FILE, _PARENT = "RFT_KEEP_RUNNING_FILE", "RFT_KEEP_RUNNING_PID"
# Signals end a run in good order with these.
_FINAL = (0, ConfigError.exit_code, *(128 + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)))


def keep_running(
    first: Sequence[str],
    later: Callable[[str], Sequence[str]],
    num_steps: Callable[[str], int],
    say: Callable[[str], None],
    *,
    pause_s: float = _PAUSE_S,
    command: Sequence[str] = (sys.executable, "-P", "-m", "rftcore", "run"),
) -> int:
    """Run `rft run` until it ends for good; return its exit code.

    Args:
        first: arguments of the first start.
        later: returns those that resume the run of a name.
        num_steps: returns the steps that the run of a name has trained by now.
        say: receives a line for each resumption.
        pause_s: seconds before the first resumption without progress.
        command: `rft run`.
    """
    arguments, num_in_a_row, steps = first, 0, 0
    with Interrupts() as interrupts, tempfile.TemporaryDirectory(prefix="rft-run-") as folder:
        interrupts.defer()
        file = Path(folder) / "name"
        while True:
            code = _run([*command, *arguments], interrupts, file)
            if code in _FINAL or interrupts.stop:
                return code
            name = file.read_text(encoding="utf-8") if file.exists() else None
            now = 0 if name is None else _known(num_steps, name, steps)
            num_in_a_row = 1 if now > steps else num_in_a_row + 1
            steps = now
            if name is None or steps == 0 or num_in_a_row >= MAX_IN_A_ROW:
                why = "no step was trained" if steps == 0 else f"{num_in_a_row} ends in a row without a trained step"
                say(f"--keep-running does not resume: {why}")
                return code
            pause = min(pause_s * 2 ** (num_in_a_row - 1), _LONGEST_PAUSE_S)
            say(f"the run {name} ended {_how(code)} after step {steps}; --keep-running resumes it in {pause:.0f} s")
            if not _wait(pause, interrupts):
                return interrupts.exit_code
            arguments = later(name)


_file: Path | None = None  # of this process, if it is resumed by another one


def follow_parent() -> None:
    """Let the system ask this process to stop when the process that resumes it is killed; without one, do nothing."""
    global _file
    # Removed, since a user's code may call `rft run`, too.
    file, parent = os.environ.pop(_FILE, ""), os.environ.pop(_PARENT, "")
    if file and parent.isdecimal():
        _file = Path(file)
        end_with_parent(int(parent), signal.SIGTERM)


def report_run(name: str) -> None:
    """Write the name of a stored run for the process that resumes it, if there is one."""
    if _file is not None:
        with contextlib.suppress(OSError):  # that process was killed
            write_whole(_file, name)


def _run(command: Sequence[str], interrupts: Interrupts, file: Path) -> int:
    """Start `rft run`, pass signals on to it, and return its exit code; that of a shell for a process that was killed."""
    process = subprocess.Popen(command, env={**os.environ, _FILE: str(file), _PARENT: str(os.getpid())})
    passed = 0
    while True:
        try:
            code = process.wait(_LOOK_S)
            return code if code >= 0 else 128 - code
        except subprocess.TimeoutExpired:
            # A terminal signals both processes; what comes twice within a second counts once.
            received = [interrupts.first] * (interrupts.stop + interrupts.urgent)
            for number in received[passed:]:
                process.send_signal(number or signal.SIGTERM)
            passed = len(received)


def _known(num_steps: Callable[[str], int], name: str, before: int) -> int:
    try:
        return max(before, num_steps(name))
    except RftError:
        return max(before, 1)  # the database does not answer: not a reason to give up


def _how(code: int) -> str:
    return f"with exit code {code}" if code < 128 else f"by signal {code - 128}"


def _wait(seconds: float, interrupts: Interrupts) -> bool:
    """Wait; return False if a signal came meanwhile."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and not interrupts.stop:
        time.sleep(_LOOK_S)
    return not interrupts.stop
