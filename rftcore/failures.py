"""Descriptions of errors in user functions: one line with the place in the user's code, and the user's part of the stack.

Frames of these packages above and below the user's code do not help the user and are left out.
"""

from __future__ import annotations

import asyncio
import re
import traceback
from pathlib import Path

from rftdata.errors import RftError
from rftdata.user_code.frames import is_ours, is_standard, is_the_users

_MAX_FRAMES = 20
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)$')


class FunctionFailedError(Exception):
    """A user's function failed in another process.

    Attributes:
        text: type, message and place.
        stack: the user's frames, as a traceback.
        timed_out: whether it exceeded its time limit.
    """

    def __init__(self, text: str, stack: str, *, timed_out: bool = False) -> None:
        super().__init__(text)
        self.text = text
        self.stack = stack
        self.timed_out = timed_out

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (self.text, self.stack, self.timed_out)


class InfrastructureError(Exception):
    """Something outside the rollout failed: a lost connection, a process that the system ended, a lack of memory.

    It depends neither on the policy nor on the task, so the rollout is tried again. Environments, tools and workflows may raise it.
    """


def _rebuild(text: str, stack: str, timed_out: bool) -> FunctionFailedError:
    return FunctionFailedError(text, stack, timed_out=timed_out)


def holds(error: BaseException, *kinds: type[BaseException]) -> bool:
    """Return whether an error, or one of a group of errors from concurrent requests, is of one of these kinds."""
    return isinstance(error, kinds) or (isinstance(error, BaseExceptionGroup) and error.subgroup(kinds) is not None)


def comes_from_outside(error: BaseException) -> bool:
    """Return whether an exception is none of the awaited code: the task of its caller is cancelled, or its coroutine is closed."""
    task = asyncio.current_task()
    is_cancelled = isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling() > 0)
    return is_cancelled or isinstance(error, GeneratorExit)


def describe(error: BaseException) -> str:
    """Return type, message and place of a function's error: `KeyError: 'answer' (reward.py, line 3, in score)`."""
    error = innermost(error)
    if isinstance(error, FunctionFailedError):
        return error.text
    if type(error) is RftError:  # an error of this package, which contains a remedy
        return str(error)
    return f"{_raised(error)}{user_line(error_frames(error))}"


def user_stack(error: BaseException) -> str:
    """Return the user's frames of a function's error, as a traceback."""
    error = innermost(error)
    if isinstance(error, FunctionFailedError):
        return error.stack
    return as_traceback(error_frames(error), "".join(traceback.format_exception_only(error)).rstrip())


def _raised(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - the message is made by a user's class
        return f"{type(error).__name__}, whose message cannot be written"


def innermost(error: BaseException) -> BaseException:
    """Return the first error of a group (of concurrent requests), which is more specific than the group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def error_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the user's frames of a function's error; for a time-out, those in which it waited."""
    if isinstance(error, TimeoutError) and isinstance(error.__cause__, asyncio.CancelledError):
        error = error.__cause__
    return user_frames(traceback.extract_tb(error.__traceback__))


def waited_at(error: BaseException) -> str:
    """Return where an ended rollout was, in brackets: from its own frames, or as recorded by the thread of a plain workflow."""
    error = innermost(error)
    cause = error.__cause__
    notes = getattr(cause, "__notes__", None)
    return str(notes[0]) if notes else user_line(error_frames(error))


def user_frames(frames: traceback.StackSummary) -> list[traceback.FrameSummary]:
    """Return the frames from the first one of the user's code to the last one outside these packages."""
    theirs = [position for position, frame in enumerate(frames) if not is_ours(frame.filename)]
    # Above are the interpreter's own frames: the event loop, the thread, the start of the process.
    first = next((position for position in theirs if not is_standard(frames[position].filename)), None)
    return [] if first is None else list(frames[first : theirs[-1] + 1])


def dumped_frames(dumped: str, file_name: str) -> traceback.StackSummary:
    """Return the main thread's frames from faulthandler's output, outermost first.

    Args:
        file_name: of the module that calls the user's code; the user's own threads have no frame of it.
    """
    threads = dumped.split("\n\n")
    lines = next((thread for thread in threads if file_name in thread), threads[-1]).splitlines()
    matches = [match for line in lines if (match := _FRAME.match(line))]
    return traceback.StackSummary.from_list([(m["file"], int(m["line"]), m["name"], None) for m in reversed(matches)])


def as_traceback(frames: list[traceback.FrameSummary], last_line: str) -> str:
    """Format frames and a closing line as a traceback."""
    if not frames:
        return last_line
    text = "".join(traceback.format_list(frames[-_MAX_FRAMES:]))
    return f"Traceback (most recent call last):\n{text}{last_line}"


def user_line(frames: list[traceback.FrameSummary]) -> str:
    """Return the user's innermost line, in brackets; empty if no frame is known."""
    own = [frame for frame in frames if is_the_users(frame.filename)] or frames
    if not own:
        return ""
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno}, in {own[-1].name})"
