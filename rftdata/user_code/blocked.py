"""How a process ends that a function of the user blocks for good, and what it leaves for the process that watches it.

A function that does not return and ignores every time limit cannot be stopped from within its process. The process writes one report
into the folder of its run, `stacks/<host>-<pid>.blocked.txt`, and exits with `EXIT_CODE`. The first line of the report is a sentence that
names the function and the task or rows; the rest is the stack. `rft run` shows the sentence and starts the role again
(`rftcore.launch.restarts`). The claims of the process are released as those of any process that died.

The standard library only: this must work while the rest of the process does not.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from rftdata.errors import TimeLimitError
from rftdata.user_code.frames import is_ours, is_the_users

EXIT_CODE = 86
_FOLDER = "stacks"
_SUFFIX = ".blocked.txt"

_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_WAITING = ("threading.py", "selectors.py", "queue.py", "socket.py", "connection.py", "thread.py")

_run_folder: Path | None = None


def report_to(run_folder: Path) -> None:
    """Name the folder of the run to which this process reports; roles call it when they have joined a run."""
    global _run_folder
    _run_folder = run_folder.absolute()
    # A report that an earlier process of the same number left is not of this one.
    report_path(_run_folder, os.getpid()).unlink(missing_ok=True)


def report_path(run_folder: Path, pid: int, host: str | None = None) -> Path:
    """Where a process reports what blocked it; of this host by default. Hosts may share the folder."""
    return run_folder / _FOLDER / f"{host or os.uname().nodename}-{pid}{_SUFFIX}"


def reports(run_folder: Path) -> Iterator[tuple[str, int]]:
    """Host and number of each process that has written a report into the folder of a run."""
    for path in (run_folder / _FOLDER).glob(f"*-*{_SUFFIX}"):
        host, _, pid = path.name.removesuffix(_SUFFIX).rpartition("-")
        if pid.isdecimal():
            yield host, int(pid)


def read_report(run_folder: Path, pid: int, host: str | None = None) -> tuple[str, str] | None:
    """Sentence and stack of a process that was blocked; None where it left no report.

    A process writes a sentence before each call that may block it (`rftdata.user_code.time_limits`). Without a stack behind it nothing was blocked.
    """
    try:
        text = report_path(run_folder, pid, host).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None
    sentence, _, stack = text.partition("\n")
    if not stack.strip():
        return None
    return sentence.rstrip() + _place(stack), stack


def _place(stack: str) -> str:
    """The user's line in the stacks of all threads as faulthandler writes them, in brackets; nothing in those that name it already."""
    for thread in stack.split("\n\n"):
        frames = _FRAME.findall(thread)
        # Threads that wait in the standard library or in these packages block nothing.
        if frames and Path(frames[0][0]).name not in _WAITING and not is_ours(frames[0][0]):
            for file, line, name in frames:
                if is_the_users(file):
                    return f" ({Path(file).name}, line {line}, in {name})"
    return ""


def end_blocked_process(sentence: str, stack: str) -> NoReturn:
    """Report what blocks this process and exit at once, from any thread.

    Nothing is closed and no handler runs: each could wait for the thread that is blocked. A report that cannot be written goes to
    standard error only.

    Args:
        sentence: names the function and the task or rows; what a person reads first.
        stack: where the function is.
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
    """What becomes of a call that cannot be stopped where nothing else handles it: a role reports it to its run and ends at once."""
    if _run_folder is not None:
        end_blocked_process(str(error), error.stack)
    print_blocked(error)


def print_blocked(error: TimeLimitError) -> None:
    """Print the error of a call that cannot be stopped, with its stack."""
    # Not sys.stderr: the blocked thread may hold its lock.
    os.write(2, f"{error.stack.rstrip()}\nrft: {error}\n".encode("utf-8", "replace"))


def _write(path: Path, text: str) -> None:
    """Write a whole report or none: the reader may look at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8", errors="replace")
    part.replace(path)
