"""How a role of `rft run` finds its run in the buffer, and the messages of a role that a person started by hand.

`rft run` has checked the configuration and stored the run; `rftcore.launch.by_hand` does both for a role that is started by hand.
"""

from __future__ import annotations

import functools
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import rftdata
from rftcore.config.run import RunConfig
from rftcore.installation.packages import check_environment
from rftcore.resolved import ResolvedRun
from rftcore.run.commands import buffer_option
from rftcore.run.stacks import answer_requests
from rftdata.buffer import Buffer
from rftdata.run import Run
from rftdata.user_code import blocked_process
from rftdata.workers.live_workers import live_workers, record_blocked_workers

VERBS = {"explorer": "explore", "pipeline": "process", "trainer": "train"}
# Interval after which a waiting role repeats the same message.
_REMINDER_S = 60.0
# A role that was suspended within a transaction keeps others waiting for no longer. No transaction of a role waits for anything but the database.
_IDLE_TRANSACTION_S = 60.0


@dataclass(frozen=True)
class JoinedRun:
    """A role's view of its run.

    Attributes:
        by_hand: reports to the person who started the role; None for a role that `rft run` started.
        phases: the parts of the role's start until it joined, see `Worker`; empty if they are not known.
    """

    buffer: Buffer
    run: Run
    resolved: ResolvedRun
    by_hand: HandStartedRole | None = None
    phases: Sequence[tuple[str, float]] = ()

    @property
    def on_waiting(self) -> Callable[[str], None] | None:
        """The function to which a `Worker` of this role reports what it waits for."""
        return self.by_hand.report_waiting if self.by_hand is not None else None

    def leave(self) -> None:
        """End the role in good order, with a message if it was started by hand."""
        if self.by_hand is not None:
            self.by_hand.report_end()


def join_run(
    config: RunConfig, run: str, phases: Sequence[tuple[str, float]] = (), *, checks_packages: bool = True
) -> JoinedRun:
    """Open the buffer and find the run for which `rft run` started this role.

    The checks of `rft run` are not repeated, except that of the packages where the role may be on another machine.

    Args:
        run: its name or id.
        phases: the parts of the role's start until now.
        checks_packages: false for a role on the machine of `rft run`.
    """
    if checks_packages:
        check_environment(config.explorer.engine)
    # A person learns at once that there is no database. A role of a run that is under way waits for it, as it does later.
    buffer = open_for_role(config, waits=True)
    try:
        found = buffer.find_run(run)
    except BaseException:
        buffer.close()
        raise
    answer_for(found)
    return JoinedRun(buffer, found, ResolvedRun(config), phases=phases)


def open_for_role(config: RunConfig, *, waits: bool) -> Buffer:
    """Open the buffer for the life of a role.

    Args:
        waits: for a database that does not answer now.
    """
    report = functools.partial(print, file=sys.stderr, flush=True)
    application = f"rft {socket.gethostname()}"
    return rftdata.open(config.buffer, application=application, idle_s=_IDLE_TRANSACTION_S, report=report, waits=waits)


def answer_for(run: Run) -> None:
    """Let this process report its stacks, and user code that blocks it, in the folder of its run."""
    answer_requests(run.folder)
    record_blocked_workers(run)
    blocked_process.report_to(run.folder)


@dataclass
class HandStartedRole:
    """Messages to a person who started one role by hand: what it waits for, and which other roles are missing."""

    buffer: Buffer
    config: RunConfig
    run: Run
    role: str
    _printed: str = field(default="", init=False)
    _printed_at: float = field(default=0.0, init=False)
    _is_read: bool = field(default=True, init=False)

    def report_waiting(self, what: str) -> None:
        """Print what the role waits for: once, again when it has changed, and every minute."""
        missing = self.missing_roles()
        text = f"the {self.role} {what}"
        if missing:
            starts = " and ".join(f"rft {VERBS[role]} CONFIG" for role in missing)
            text += f"; no {' and no '.join(missing)} is at work in the run {self.run.name} (start with {starts})"
        if text != self._printed or time.monotonic() - self._printed_at >= _REMINDER_S:
            self._printed, self._printed_at = text, time.monotonic()
            self.report(text)

    def report_end(self) -> None:
        """Print the state of the run when the role leaves it."""
        run, option = self.run.refreshed(), buffer_option(self.buffer.location)
        if not run.has_ended:
            how = f"was asked to stop; continue it with rft run --resume {run.name}{option}"
        else:
            how = f"has ended ({run.status}: {run.outcome}); rft report {run.name}{option} shows its results"
        self.report(f"the {self.role} leaves: the run {run.name} {how}")

    def missing_roles(self) -> list[str]:
        """Return the roles that the run needs and that are not at work now."""
        there = {worker.role for worker in live_workers(self.run) if worker.beats}
        needed = {
            "explorer": self.config.has_explorer,
            "pipeline": self.config.has_pipeline,
            "trainer": True,
        }
        return [role for role, is_needed in needed.items() if is_needed and role not in there and role != self.role]

    def report(self, text: str) -> None:
        """Print a message. Once the terminal or pipe is closed, nothing is printed any more, and the role continues."""
        if self._is_read:
            try:
                print(text, flush=True)
            except (OSError, ValueError):
                self._is_read = False
