"""`rft run --keep-running`: a process that starts `rft run`, and resumes it after an end that the user did not ask for.

When a machine runs out of memory, a GPU fails or a cluster is preempted, a person would only resume the run. `rft run` is a separate process here,
so it is resumed even after it was killed. These ends are final: a finished run, a signal, a mistake that is found before the run begins (exit code
2), an end before the first trained step, and `MAX_IN_A_ROW` ends without a trained step in between. A pause precedes each resumption, and grows
while nothing is trained.

The run writes its name into a file when it is stored, because another run may have the configuration's name. When this process is killed, the run
is asked to stop.
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

from rftcore.launch.signals import StopSignals
from rftcore.parent_process import end_with_parent
from rftdata.errors import ConfigError, RftError
from rftdata.files.durable import write_whole

MAX_IN_A_ROW = 5
_PAUSE_S = 5.0
_LONGEST_PAUSE_S = 300.0
_LOOK_S = 0.2
# Variables of `rft run`: the file into which it writes the name of its run, and the id of the process that resumes it.
_FILE, _PARENT = "RFT_KEEP_RUNNING_FILE", "RFT_KEEP_RUNNING_PID"
# Exit codes of final ends; 128 + a signal is that of a run which the signal stopped.
_FINAL = (0, ConfigError.exit_code, *(128 + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)))


def keep_running(
    first: Sequence[str],
    later: Callable[[str], Sequence[str]],
    num_steps: Callable[[str], int],
    report: Callable[[str], None],
    *,
    pause_s: float = _PAUSE_S,
    command: Sequence[str] = (sys.executable, "-P", "-m", "rftcore", "run"),
) -> int:
    """Run `rft run` until it ends for good; return its exit code.

    Args:
        first: arguments of the first start.
        later: returns those that resume the run of a name.
        num_steps: returns the steps that the run of a name has trained by now.
        report: receives a line for each resumption.
        pause_s: seconds before the first resumption without progress.
        command: `rft run`.
    """
    arguments, num_in_a_row, steps = first, 0, 0
    with StopSignals() as signals, tempfile.TemporaryDirectory(prefix="rft-run-") as folder:
        signals.defer()
        file = Path(folder) / "name"
        while True:
            code = _run([*command, *arguments], signals, file)
            if code in _FINAL or signals.stop:
                return code
            name = file.read_text(encoding="utf-8") if file.exists() else None
            now = 0 if name is None else _steps_so_far(num_steps, name, steps)
            num_in_a_row = 1 if now > steps else num_in_a_row + 1
            steps = now
            if name is None or steps == 0 or num_in_a_row >= MAX_IN_A_ROW:
                why = "no step was trained" if steps == 0 else f"{num_in_a_row} ends in a row without a trained step"
                report(f"--keep-running does not resume: {why}")
                return code
            pause = min(pause_s * 2 ** (num_in_a_row - 1), _LONGEST_PAUSE_S)
            report(
                f"the run {name} ended {_exit_words(code)} after step {steps}; --keep-running resumes it in {pause:.0f} s"
            )
            if not _wait(pause, signals):
                return signals.exit_code
            arguments = later(name)


_file: Path | None = None  # for the name of the run, if another process resumes it


def follow_parent() -> None:
    """Ask the system to stop this process when the process that resumes it is killed. Does nothing if there is none."""
    global _file
    # Removed, because a user's code may call `rft run` too.
    file, parent = os.environ.pop(_FILE, ""), os.environ.pop(_PARENT, "")
    if file and parent.isdecimal():
        _file = Path(file)
        end_with_parent(int(parent), signal.SIGTERM)


def report_run(name: str) -> None:
    """Write the name of a stored run for the process that resumes it, if there is one."""
    if _file is not None:
        with contextlib.suppress(OSError):  # the other process was killed
            write_whole(_file, name)


def _run(command: Sequence[str], signals: StopSignals, file: Path) -> int:
    """Start `rft run`, pass signals on to it, and return its exit code; 128 + the signal if it was killed."""
    process = subprocess.Popen(command, env={**os.environ, _FILE: str(file), _PARENT: str(os.getpid())})
    passed = 0
    while True:
        try:
            code = process.wait(_LOOK_S)
            return code if code >= 0 else 128 - code
        except subprocess.TimeoutExpired:
            # A terminal signals both processes; what comes twice within a second counts once.
            received = [signals.first] * (signals.stop + signals.urgent)
            for number in received[passed:]:
                process.send_signal(number or signal.SIGTERM)
            passed = len(received)


def _steps_so_far(num_steps: Callable[[str], int], name: str, before: int) -> int:
    """Return the trained steps of a run; at least one if the database does not answer."""
    try:
        return max(before, num_steps(name))
    except RftError:
        return max(before, 1)


def _exit_words(code: int) -> str:
    return f"with exit code {code}" if code < 128 else f"by signal {code - 128}"


def _wait(seconds: float, signals: StopSignals) -> bool:
    """Wait; return False if a signal arrived meanwhile."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and not signals.stop:
        time.sleep(_LOOK_S)
    return not signals.stop
