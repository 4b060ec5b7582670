"""Classify the files of a stack, and find the place in the user's own code. Standard library only."""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from pathlib import Path
from types import CodeType, FrameType

_OURS = tuple(str(Path(__file__).resolve().parents[2] / name) + os.sep for name in ("rftdata", "operators", "rftcore"))
_STANDARD = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))
_INSTALLED = tuple(sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib"))
_FILE = re.compile(r'^  File "(.+?)", line', re.MULTILINE)


def is_ours(filename: str) -> bool:
    """Return whether a file belongs to these packages."""
    return filename.startswith(_OURS)


def is_standard(filename: str) -> bool:
    """Return whether a file belongs to the standard library, or is not a file (`<frozen runpy>`, a template)."""
    return filename.startswith((*_STANDARD, "<")) and not filename.startswith(_INSTALLED)


def is_the_users(filename: str) -> bool:
    """Return whether a file is the user's own: neither of these packages nor of a library."""
    return not filename.startswith((*_OURS, *_STANDARD, *_INSTALLED, "<"))


def user_stack(frame: FrameType, below: CodeType) -> tuple[str, str]:
    """Return a thread's stack as a traceback, and its innermost place that is in neither a library nor these packages.

    Args:
        frame: the innermost frame of the thread.
        below: code of the function that calls the user's; its innermost frame and the frames around it are left out.
    """
    frames = traceback.extract_stack(frame)
    started = [n for n, one in enumerate(frames) if (one.filename, one.name) == (below.co_filename, below.co_name)]
    frames = traceback.StackSummary.from_list(frames[started[-1] + 1 :] if started else frames)
    theirs = [one for one in frames if is_the_users(one.filename)]
    text = "Stack of the function (most recent call last):\n" + "".join(frames.format())
    if not theirs:
        return text, ""
    return text, f"{Path(theirs[-1].filename).name}, line {theirs[-1].lineno}, in {theirs[-1].name}"


def has_users_frame(stack: str) -> bool:
    """Return whether a stack from `user_stack` contains user code."""
    return any(is_the_users(file) for file in _FILE.findall(stack))
