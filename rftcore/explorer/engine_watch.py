"""Ends an explorer whose engine hangs, so that another process takes its place with current weights.

A GPU that stops answering, a deadlock, or a message from a peer that never comes keep the engine's thread inside native code, where no
exception reaches it. A thread of its own looks how long the engine has been at one piece of work. Beyond the limit it reports the stack and
ends the process, as for user code that blocks (`rftdata.user_code.blocked`). The claims are released at once, and nothing is mislabelled,
because groups are stored whole. An engine that computes, however slowly, ends one step after the other and is left alone. Where native code
also holds the interpreter's lock, no thread runs, and the watch of workflows ends the process (`workflow_loop`).
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable
from typing import NoReturn

from rftcore.engines.base import Engine
from rftcore.run.hang_watch import HangWatch
from rftdata.user_code.blocked import end_blocked_process


def watch_engine(engine: Engine, limit_s: float, end: Callable[[str, str], None]) -> HangWatch:
    """Watch an engine.

    Args:
        limit_s: seconds that one piece of work may take.
        end: receives a sentence and the stack of an engine that hangs; it should end the process.
    """
    sentence = f"its engine hangs: one step or change of weights took more than {limit_s:g} s (explorer.hang_s)"
    return HangWatch(engine.stuck_s, limit_s, lambda: end(sentence, engine.stack()))


def end_hanging_process(sentence: str, stack: str) -> NoReturn:
    """End this process and those of a divided engine, which would keep their GPUs."""
    for process in multiprocessing.active_children():
        with contextlib.suppress(OSError):
            process.kill()
    end_blocked_process(sentence, stack)
