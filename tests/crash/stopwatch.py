"""Measure what a process waits for between its start and the buffer's first answer to its request for work.

Time is counted by phase (opens the buffer, takes the run, …) and, inside a phase, by wait: a connection, a named query, what a role reports that it
waits for, a pause, a program, a file lock. The rest of a phase is computing, or waiting for a processor. Only the outermost phase and
the outermost wait count, so that the parts of a life add up to its seconds. Threads of their own (heartbeat, lease) are not counted: they
start with an empty context. Where threads that do count wait at the same time, what is left to computing may be negative.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import psycopg_pool
from filelock import FileLock

import rftdata
from rftcore.explorer.role import Explorer
from rftcore.trainer.learner import Learner
from rftcore.trainer.role import TrainerRole
from rftdata.attempts.attempt import Attempt
from rftdata.pipeline.queue import SealedQueue
from rftdata.postgres.database import queries
from rftdata.postgres.notify import Listener
from rftdata.workers.worker import Worker

_PHASES: list[tuple[Any, str, str]] = [
    (rftdata, "open", "opens the buffer"),
    (Worker, "__init__", "registers"),
    (Attempt, "start", "takes the run"),
    (Learner, "__init__", "loads the model"),
    (Learner, "load_checkpoint", "loads the checkpoint"),
    (TrainerRole, "_publish", "publishes weights"),
    (Attempt, "draw", "draws"),
    (Explorer, "_claim", "plans and claims"),
    (SealedQueue, "claim", "claims"),
]
_BETWEEN, _COMPUTES = "between", "computes"

_phase: contextvars.ContextVar[str] = contextvars.ContextVar("phase")
_waits: contextvars.ContextVar[bool] = contextvars.ContextVar("waits", default=False)


class Stopwatch:
    """The time of this process, from now on; one per process, since it wraps what the process calls."""

    def __init__(self) -> None:
        self._started, self._processor = time.monotonic(), time.process_time()
        self._spent: Counter[str] = Counter()
        self._waited: Counter[tuple[str, str]] = Counter()
        self._phase_began = self._started
        self._names = {text: f"query {name}" for name, text in queries().items()}
        self._said = "a notification"
        _phase.set(_BETWEEN)
        for owner, name, phase in _PHASES:
            _wrap(owner, name, functools.partial(self._in_phase, phase))
        set_state = Worker.set_state

        def remember(worker: Worker, state: str, waiting_for: str | None = None, **options: Any) -> None:
            self._said = waiting_for or self._said
            set_state(worker, state, waiting_for, **options)

        Worker.set_state = remember  # type: ignore[method-assign]
        self._count(psycopg.Connection, "execute", lambda _, query, *__: self._names.get(query, "query"))
        self._count(psycopg.Connection, "wait", lambda *_: "begin or commit")
        self._count(psycopg, "connect", lambda *_: "connection")
        self._count(psycopg_pool.ConnectionPool, "getconn", lambda *_: "connection")
        self._count(FileLock, "acquire", lambda *_: "file lock")
        self._count(subprocess, "run", lambda command, *_: f"program {str(command[0]).rpartition('/')[2]}")
        self._count(Listener, "wait", lambda *_: self._said)
        self._count(time, "sleep", lambda *_: f"pause in {sys._getframe(4).f_globals['__name__']}")

    def read(self) -> dict[str, Any]:
        """`seconds` since the start, `processor_s` used of them, and as `parts` [phase, wait, seconds], the longest first."""
        now = time.monotonic()
        seconds = now - self._started
        spent = self._spent.copy()
        if (phase := _phase.get(_BETWEEN)) != _BETWEEN:  # it reads within a phase, of which waits are counted already
            spent[phase] += now - self._phase_began
        spent[_BETWEEN] = seconds - spent.total()
        parts = Counter(self._waited)
        for phase, total in spent.items():
            parts[phase, _COMPUTES] = total - sum(s for (of, _), s in self._waited.items() if of == phase)
        return {
            "seconds": round(seconds, 3),
            "processor_s": round(time.process_time() - self._processor, 3),
            "parts": [[*key, round(part, 3)] for key, part in parts.most_common() if abs(part) >= 0.001],
        }

    def _count(self, owner: Any, name: str, label: Callable[..., str]) -> None:
        _wrap(owner, name, functools.partial(self._in_wait, label))

    @contextlib.contextmanager
    def _in_phase(self, phase: str, *_: Any) -> Iterator[None]:
        if _phase.get(None) != _BETWEEN:
            yield
            return
        token, self._phase_began = _phase.set(phase), time.monotonic()
        try:
            yield
        finally:
            _phase.reset(token)
            self._spent[phase] += time.monotonic() - self._phase_began

    @contextlib.contextmanager
    def _in_wait(self, label: Callable[..., str], *args: Any) -> Iterator[None]:
        phase = _phase.get(None)
        if phase is None or _waits.get():
            yield
            return
        what, token, started = label(*args), _waits.set(True), time.monotonic()
        try:
            yield
        finally:
            _waits.reset(token)
            self._waited[phase, what] += time.monotonic() - started


def _wrap(owner: Any, name: str, around: Callable[..., contextlib.AbstractContextManager[None]]) -> None:
    """Call `owner.name` inside the context manager that `around` makes of its arguments."""
    getattr(owner, name)  # a package may import it only now
    found = inspect.getattr_static(owner, name)
    called = found.__func__ if isinstance(found, classmethod) else found

    @functools.wraps(called)
    def wrapped(*args: Any, **options: Any) -> Any:
        with around(*args):
            return called(*args, **options)

    setattr(owner, name, classmethod(wrapped) if isinstance(found, classmethod) else wrapped)
