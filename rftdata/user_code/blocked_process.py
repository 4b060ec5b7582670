"""End of a process that a user function blocks for good, and its report to the process that watches it.

A function that does not return and ignores every time limit cannot be stopped from within its process. The process writes one report
into the folder of its run, `stacks/<host>-<where its id counts>-<pid>.blocked.txt`, and exits with `EXIT_CODE`. The first line of the report is a sentence that
names the function and the task or rows; the rest is the stack. `rft run` shows the sentence and starts the role again
(`rftcore.launch.restarts`). The claims of the process are released like those of any process that exits.

Uses only the standard library, because this must work while the rest of the process does not.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from rftdata.errors import TimeLimitError
from rftdata.processes import pid_space
from rftdata.user_code.frames import is_ours, is_the_users

EXIT_CODE = 86
_FOLDER = "stacks"
_SUFFIX = ".blocked.txt"

_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_WAITING = ("threading.py", "selectors.py", "queue.py", "socket.py", "connection.py", "thread.py")

_run_folder: Path | None = None


def report_to(run_folder: Path) -> None:
    """Set the folder of the run to which this process reports; roles call it after joining a run."""
    global _run_folder
    _run_folder = run_folder.absolute()
    # Remove a report that an earlier process with the same number left.
    report_path(_run_folder, os.getpid()).unlink(missing_ok=True)


def report_path(run_folder: Path, pid: int, host: str | None = None, space: str | None = None) -> Path:
    """Return the path of a process's report, by default on this host and in this process's space. Hosts and containers may share the folder.

    Args:
        space: see `rftdata.processes.pid_space`.
    """
    return run_folder / _FOLDER / f"{host or os.uname().nodename}-{space or pid_space()}-{pid}{_SUFFIX}"


def reports(run_folder: Path) -> Iterator[tuple[str, str, int]]:
    """Yield host, space and number of each process that has a report in the folder of a run."""
    for path in (run_folder / _FOLDER).glob(f"*-*-*{_SUFFIX}"):
        place, _, pid = path.name.removesuffix(_SUFFIX).rpartition("-")
        host, _, space = place.rpartition("-")
        if pid.isdecimal():
            yield host, space, int(pid)


def read_report(
    run_folder: Path, pid: int, host: str | None = None, space: str | None = None
) -> tuple[str, str] | None:
    """Return sentence and stack of a blocked process; None if it left no report.

    A process writes a sentence before each call that may block it (`rftdata.user_code.time_limits`). Without a stack after it, nothing was blocked.
    """
    try:
        text = report_path(run_folder, pid, host, space).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None
    sentence, _, stack = text.partition("\n")
    if not stack.strip():
        return None
    return sentence.rstrip() + _users_line(stack), stack


def _users_line(stack: str) -> str:
    """Return the user's line in faulthandler's stacks of all threads, in brackets; nothing if the stack already names it."""
    for thread in stack.split("\n\n"):
        frames = _FRAME.findall(thread)
        # A thread that waits in the standard library or in these packages is not the blocked one.
        if frames and Path(frames[0][0]).name not in _WAITING and not is_ours(frames[0][0]):
            for file, line, name in frames:
                if is_the_users(file):
                    return f" ({Path(file).name}, line {line}, in {name})"
    return ""


def end_blocked_process(sentence: str, stack: str) -> NoReturn:
    """Report what blocks this process and exit at once, from any thread.

    Nothing is closed and no handler runs, since each could wait for the blocked thread. A report that cannot be written goes to
    standard error only.

    Args:
        sentence: names the function and the task or rows; the first line that a person reads.
        stack: the stack of the function.
    """
    text = " ".join(sentence.split()) + "\n" + stack.rstrip("\n") + "\n"
    try:
        with contextlib.suppress(OSError, ValueError):
            os.write(2, text.encode("utf-8", "replace"))  # not sys.stderr: the blocked thread may hold its lock
        if _run_folder is not None:
            with contextlib.suppress(OSError):
                _write(report_path(_run_folder, os.getpid()), text)
    finally:
        os._exit(EXIT_CODE)


def report_or_print(error: TimeLimitError) -> None:
    """Handle a call that cannot be stopped and that no other handler reports: a role reports it to its run and exits at once."""
    if _run_folder is not None:
        end_blocked_process(str(error), error.stack)
    print_blocked(error)


def print_blocked(error: TimeLimitError) -> None:
    """Print the error of a call that cannot be stopped, with its stack."""
    # Not sys.stderr: the blocked thread may hold its lock.
    os.write(2, f"{error.stack.rstrip()}\nrft: {error}\n".encode("utf-8", "replace"))


def _write(path: Path, text: str) -> None:
    """Write a complete report or none, since it may be read at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8", errors="replace")
    part.replace(path)
