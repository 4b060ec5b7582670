"""How a role finds its run in the buffer, and its messages to a person who started it by hand.

`rft run` passes the run to the roles it starts. A role started by hand joins the run of the configuration's name that is at work
or has not begun. It creates a run only if the buffer has none of that name: next to runs that have ended, another one that no other role
joins would wait forever.
"""

from __future__ import annotations

import functools
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import rftdata
from rftcore.config.run import RunConfig
from rftcore.installation.packages import check_environment
from rftcore.resolved import ResolvedRun
from rftcore.run.commands import buffer_option
from rftcore.run.prepare import check_run, prepare_run
from rftcore.run.stacks import answer_requests
from rftdata.buffer import Buffer
from rftdata.errors import ConfigError
from rftdata.run import Run
from rftdata.user_code import blocked_process
from rftdata.workers.worker import live_workers, note_blocked_workers

_VERBS = {"explorer": "explore", "pipeline": "process", "trainer": "train"}
# Interval after which a waiting role repeats the same message.
_REMINDER_S = 60.0
# A role that was suspended within a transaction keeps others waiting for no longer. No transaction of a role waits for anything but the database.
_IDLE_TRANSACTION_S = 60.0


@dataclass(frozen=True)
class JoinedRun:
    """A role's view of its run.

    Attributes:
        by_hand: prints what the role waits for; None for a role that `rft run` started.
    """

    buffer: Buffer
    run: Run
    resolved: ResolvedRun
    by_hand: Companions | None = None

    @property
    def on_waiting(self) -> Callable[[str], None] | None:
        """The function to which a `Worker` of this role reports what it waits for."""
        return self.by_hand.waiting if self.by_hand is not None else None

    def leave(self) -> None:
        """End the role in good order, with a message if it was started by hand."""
        if self.by_hand is not None:
            self.by_hand.farewell()


def join_run(resolved: ResolvedRun, run: str | None, *, by_hand: str | None = None) -> JoinedRun:
    """Open the buffer and find the run that a role belongs to; the first role of a new configuration creates it.

    A role that `rft run` started repeats none of its checks, except that of the packages on its machine.

    Args:
        run: name or id; None for the newest run of the configuration's name that is at work or has not begun, else a new one.
        by_hand: the role, if a person started it; it prints which run it joined.

    Raises:
        ConfigError: there are only ended runs to join for a role started by hand.
    """
    config = resolved.config
    if by_hand is not None:
        check_run(resolved)
    else:
        check_environment(config.explorer.engine)
    report = functools.partial(print, file=sys.stderr, flush=True)
    # A person learns at once that there is no database. A role of a run that is under way waits for it, as it does later.
    buffer = rftdata.open(
        config.buffer,
        application=f"rft {socket.gethostname()}",
        idle_s=_IDLE_TRANSACTION_S,
        report=report,
        waits=by_hand is None,
    )
    try:
        joined, is_new = (
            _named(buffer, run, by_hand) if run is not None else _of_name(resolved, buffer, by_hand, report)
        )
    except BaseException:
        buffer.close()
        raise
    answer_requests(joined.folder)
    note_blocked_workers(joined)
    blocked_process.report_to(joined.folder)
    companions = None
    if by_hand is not None:
        companions = Companions(buffer, config, joined, by_hand)
        companions.say(
            f"{'makes' if is_new else 'joins'} the run {joined.name} in the buffer {buffer.location} as its {by_hand}"
        )
    return JoinedRun(buffer, joined, resolved, companions)


def _named(buffer: Buffer, name: str, by_hand: str | None) -> tuple[Run, bool]:
    run = buffer.find_run(name)
    # A trainer resumes an interrupted run, and the other roles follow.
    goes_on = not run.has_ended or (by_hand == "trainer" and run.status != "finished")
    if by_hand is not None and not goes_on:
        raise _ended(buffer, run, by_hand)
    return run, False


def _of_name(
    resolved: ResolvedRun, buffer: Buffer, by_hand: str | None, report: Callable[[str], object]
) -> tuple[Run, bool]:
    with buffer.joining():
        found = buffer.runs(resolved.config.run.name, imported=False)
        for run in found:
            if not run.has_ended:
                return run, False
        if found and by_hand is not None:
            raise _ended(buffer, found[0], by_hand)
        return prepare_run(resolved, buffer, report=report), True


def _ended(buffer: Buffer, run: Run, role: str) -> ConfigError:
    name, option = run.name, buffer_option(buffer.location)
    verb = f"rft {_VERBS[role]} CONFIG"
    ways = []
    if run.status == "finished":
        how = f"has finished its {run.planned_steps} step{'' if run.planned_steps == 1 else 's'}"
        ways.append(f"continue with more steps: rft run CONFIG --resume {name} --set steps={2 * run.planned_steps}")
    else:
        how = f"has ended ({run.status})"
        ways.append(
            f"continue it: rft run --resume {name}{option}, or by hand with rft train CONFIG --run {name} first"
        )
    if role == "pipeline":
        ways.append(f"decide on what it stored: rft pipeline replay CONFIG --run {name}")
    ways.append(f"start a new run: rft run CONFIG, or {verb} --set run.name=NAME for every role")
    return ConfigError(
        f"the run {name!r} {how}: there is nothing to do in it for {'an' if role == 'explorer' else 'a'} {role}",
        allowed="a run that is at work or has not begun, or a name that no run has yet",
        todo="; ".join(ways),
    )


@dataclass
class Companions:
    """Messages to a person who started one role by hand: what it waits for, and which other roles are missing."""

    buffer: Buffer
    config: RunConfig
    run: Run
    role: str
    _said: str = field(default="", init=False)
    _said_at: float = field(default=0.0, init=False)
    _heard: bool = field(default=True, init=False)

    def waiting(self, what: str) -> None:
        """Print what the role waits for: once, again when it has changed, and every minute."""
        missing = self.missing()
        text = f"the {self.role} {what}"
        if missing:
            starts = " and ".join(f"rft {_VERBS[role]} CONFIG" for role in missing)
            text += f"; no {' and no '.join(missing)} is at work in the run {self.run.name} (start with {starts})"
        if text != self._said or time.monotonic() - self._said_at >= _REMINDER_S:
            self._said, self._said_at = text, time.monotonic()
            self.say(text)

    def farewell(self) -> None:
        """Print the state of the run when the role leaves it."""
        run, option = self.run.refreshed(), buffer_option(self.buffer.location)
        if not run.has_ended:
            how = f"was asked to stop; continue it with rft run --resume {run.name}{option}"
        else:
            how = f"has ended ({run.status}: {run.outcome}); rft report {run.name}{option} shows its results"
        self.say(f"the {self.role} leaves: the run {run.name} {how}")

    def missing(self) -> list[str]:
        """Return the roles that the run needs and that are not at work now."""
        there = {worker.role for worker in live_workers(self.run) if worker.beats}
        needed = {
            "explorer": self.config.has_explorer,
            "pipeline": self.config.sampling.source is None,
            "trainer": True,
        }
        return [role for role, is_needed in needed.items() if is_needed and role not in there and role != self.role]

    def say(self, text: str) -> None:
        """Print a message. Once the terminal or pipe is closed, nothing is printed any more, and the role continues."""
        if self._heard:
            try:
                print(text, flush=True)
            except (OSError, ValueError):
                self._heard = False
