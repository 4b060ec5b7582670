"""`rft run`: prepares the run, starts its roles, shows its progress, and reports how it ended.

It does none of the run's work: it reads the buffer for its display, and watches the processes. An explorer or pipeline worker that is killed
or crashes is started again, as is every role that a user's function blocked (`restarts`). If the trainer ends before its work is done, or
another role or the launcher fails for good, the others are asked to stop, and the exit code reports it. The buffer keeps everything, and `--resume`
continues. A signal stops the run in good order (`interrupts`). Roles that do not
stop in time are killed, which does not count as their failure. Once the run has finished, its results are complete: a role that fails
after that causes a warning, and the exit code stays 0.

If the embedded database is killed, it is started again: roles wait for it (`rftdata.postgres.retry`), and the run continues. If it
was stopped, and is not started again soon, the run ends.
"""

from __future__ import annotations

import contextlib
import threading
import time

import rftdata
from rftcore.checks.run import check_start
from rftcore.config.run import RunConfig
from rftcore.findings import Findings
from rftcore.launch.deaths import RoleDiedError
from rftcore.launch.interrupts import Interrupts, StartInterrupted
from rftcore.launch.keep_running import report_run
from rftcore.launch.launcher import Launcher, reachable
from rftcore.launch.plan import placed, without_turns
from rftcore.launch.preparation import (
    GoBack,
    find_resumable,
    has_finished,
    prepare_run,
    take_back,
)
from rftcore.launch.restarts import Restarts
from rftcore.launch.reviews import People
from rftcore.launch.roles import Roles, failure
from rftcore.launch.summary import show_results
from rftcore.launch.threads import divide_threads
from rftcore.launch.views import View
from rftcore.resolved import ResolvedRun
from rftcore.run.commands import buffer_option
from rftcore.run.defaults import with_defaults
from rftcore.run.earlier import earlier_run
from rftcore.run.placement import place_run
from rftcore.run.stacks import answer_requests
from rftdata.buffer import Buffer
from rftdata.config import RetentionConfig
from rftdata.errors import (
    BufferUnavailableError,
    DiskFullError,
    FencedError,
    RftError,
    RoleFailedError,
    RolloutsFailedError,
)
from rftdata.maintenance import retention
from rftdata.reports.progress import Progress, steps_to_repeat
from rftdata.run import Run
from rftdata.user_code import held_lock
from rftdata.workers.live_workers import live_workers, record_exited_workers
from rftdata.workers.worker import Worker

_REFRESH_S = 1.0
_DISPLAY_SHARE = 0.05
_DEPARTURE_S = 45.0
# Roles wait longer for an unavailable database; this process must check the roles again soon.
_PATIENCE_S = 4.0
_MAX_REVIVALS = 10
_STOPPED_S = 10.0


def run(
    config: RunConfig,
    launcher: Launcher,
    *,
    resume: bool = False,
    name: str | None = None,
    go_back: GoBack | None = None,
    parent: Run | None = None,
    view: View,
    interrupts: Interrupts | None = None,
) -> int:
    """Run a configuration to its end.

    Args:
        launcher: starts the roles.
        resume: continue a stored run. If it has done its steps (its roles may have outlived a killed `rft run`), it is only
            reported.
        name: the run to resume; None for the newest of the configuration's name.
        go_back: resume from an earlier step, or in a new run.
        parent: the run from whose checkpoint a new run starts.
        view: receives progress and messages.
        interrupts: receives the signals of several runs in a row; None for this run alone.

    Returns:
        0 if finished, even if a role failed afterwards; 128 + its number if a signal stopped the run.

    Raises:
        RoleFailedError: a role ended early, with its error.
        RftError: the run could not be started.
    """
    with contextlib.nullcontext(interrupts) if interrupts is not None else Interrupts() as received:
        try:
            return _run(config, launcher, resume, name, go_back, parent, view, received)
        except StartInterrupted:
            view.message(f"{received.reason} before the run began")
            return received.exit_code


def _run(
    config: RunConfig,
    launcher: Launcher,
    resume: bool,
    name: str | None,
    go_back: GoBack | None,
    parent: Run | None,
    view: View,
    interrupts: Interrupts,
) -> int:
    config, findings = reachable(config), Findings()
    config, chosen = findings.value(with_defaults, config) or (config, None)
    resolved = ResolvedRun(config)
    check_start(resolved, findings)  # before a buffer is created, so that a mistake leaves none behind
    findings.refuse()
    with rftdata.open(config.buffer, application="rft run", patience_s=_PATIENCE_S, report=view.message) as buffer:
        stored = None
        if resume:
            stored = find_resumable(config, buffer, name)
            if go_back is None or go_back.fork is None:
                await_departure(stored, view)
            stored = stored.refreshed()
            if go_back is not None:
                interrupts.defer()  # it stores an attempt or a run
                resolved, stored = take_back(resolved, buffer, stored, go_back)
                view.message(f"{stored.name} begins {_begins(go_back)}")
            elif has_finished(config, stored):
                view.message(
                    f"the run {stored.name} has finished its {stored.planned_steps} steps: nothing is left to do "
                    f"(to train further, raise steps: --set steps={2 * stored.planned_steps})"
                )
                show_results(buffer, stored, view)
                return 0
        if stored is None and (sentence := earlier_run(config, buffer)) is not None:
            view.message(sentence)
        with held_lock.printed():  # the block calls sources and stages of the user
            # A stored run must end with a status, so from here on a signal stops the roles, or keeps them from starting.
            run = prepare_run(
                resolved, buffer, resumed=stored, parent=parent, before_storing=interrupts.defer, report=view.message
            )
        report_run(run.name)
        if chosen is not None:
            view.message(chosen)
        return _work(resolved, launcher, buffer, run, view, interrupts, is_resumed=resume)


def _work(
    resolved: ResolvedRun,
    launcher: Launcher,
    buffer: Buffer,
    run: Run,
    view: View,
    interrupts: Interrupts,
    *,
    is_resumed: bool,
) -> int:
    """Start the roles of a stored run and watch them until they end."""
    config = resolved.config
    started = time.monotonic()
    answer_requests(run.folder)
    view.message(f"run {run.name} in the buffer {buffer.location}{_resumed(run) if is_resumed else ''}")
    apply_retention(config.buffer.retention, buffer, run, view)
    view.message(f"model {config.model.path}: {resolved.model_folder}")
    threads = divide_threads()
    view.message(threads.sentence)
    if not interrupts.stop:
        try:
            with interrupts.kept():
                view.message(f"{launcher.start()} runs {_roles(config)}; they load what they need now")
            if not interrupts.stop:
                _supervise(resolved, launcher, buffer, run, view, interrupts, is_resumed=is_resumed)
        except DiskFullError as error:  # this process found the full disk, before any role
            todo = f"{error.todo}; then continue with {_resume(buffer, run)}"
            raise DiskFullError(error.what, value=error.value, allowed=error.allowed, todo=todo) from error
        finally:
            launcher.stop()
    return _conclude(buffer, run, view, interrupts, time.monotonic() - started)


def apply_retention(rules: RetentionConfig | None, buffer: Buffer, run: Run, view: View) -> None:
    """Purge what exceeds buffer.retention, except from the run that starts; a failure is only a warning."""
    if rules is None or not rules.has_limits:
        return
    try:
        done, _ = retention.enforce(buffer, rules, author="buffer.retention", starting_run_id=run.run_id)
    except RftError as error:
        view.message(f"warning: buffer.retention is not applied: {error}")
        return
    if done.num_experiences:
        view.message(f"buffer.retention: {done.num_experiences} experiences purged; rft.v_purged lists them")


def _begins(go_back: GoBack) -> str:
    kept = "; the groups of later steps are used" if go_back.keep_rollouts else ""
    return ("at the newest checkpoint" if go_back.step is None else f"at step {go_back.step}") + kept


def _roles(config: RunConfig) -> str:
    if config.sampling.source is None:
        return "explorer, pipeline and trainer" if config.has_explorer else "pipeline and trainer"
    return "explorer (for evaluations) and trainer" if config.has_explorer else "the trainer"


def await_departure(run: Run, view: View) -> None:
    """Wait for the processes of an earlier start of the run, which end a few seconds after a kill of their supervisor.

    Raises:
        FencedError: they are still running.
    """
    deadline = time.monotonic() + _DEPARTURE_S
    reported = False
    while True:
        record_exited_workers(run)
        alive = [worker for worker in live_workers(run) if worker.beats and worker.role != "replay"]
        if not alive:
            return
        who = ", ".join(f"{worker.role} {worker.pid} on {worker.host}" for worker in alive)
        if time.monotonic() > deadline:
            raise FencedError(
                f"the run {run.name!r} still has running processes: {who}",
                todo="stop it first (Ctrl-C in its terminal), then resume",
            )
        if not reported:
            view.message(f"waiting up to {_DEPARTURE_S:.0f} s for {who} to end")
            reported = True
        time.sleep(_REFRESH_S)


def _resumed(run: Run) -> str:
    begins, done = steps_to_repeat(run)
    lost = f"step {done}" if done == begins + 1 else f"steps {begins + 1} to {done}"
    again = f"; {lost} came after the newest checkpoint, and will be trained again" if done > begins else ""
    return f" (resumed at step {begins}{again})"


def _supervise(
    resolved: ResolvedRun,
    launcher: Launcher,
    buffer: Buffer,
    run: Run,
    view: View,
    interrupts: Interrupts,
    *,
    is_resumed: bool,
) -> None:
    """Watch the roles until the run ends.

    Raises:
        RoleFailedError: a role failed before anything asked the run to stop.
    """
    with Worker(run, "supervisor") as worker:
        worker.set_state("watches", activity="watching")
        placement = place_run(resolved, launcher.machines())
        if (sentence := placed(placement)) is not None:
            view.message(sentence)
        if (reason := without_turns(resolved.config, placement)) is not None:
            view.message(f"warning: {reason}")
        started = launcher.start_roles(resolved, run, divide_threads(), placement)
        roles = Roles(started, Restarts(run), view, interrupts, launcher)
        progress = Progress(run, resumes=is_resumed)
        show = _Display(progress, view, People(view, buffer_option(buffer.location)))
        asked_at: float | None = None
        grace_s = resolved.config.run.stop_grace_s
        revive, ask_to_stop = _Reviver(buffer, run, view), _StopRequest(run)
        while roles.running:
            roles.watch(_REFRESH_S)
            revive()
            if roles.has_lost_launcher:
                grace_s = min(grace_s, launcher.stop_s)
            if interrupts.stop or roles.failed:
                if asked_at is None:
                    asked_at = time.monotonic()
                    if roles.running:
                        _tell_stop(view, roles.failed, grace_s)
                # Repeated, because a trainer that begins its attempt now would take an earlier request for an old one.
                ask_to_stop()
            if asked_at is not None and (interrupts.urgent or time.monotonic() - asked_at > grace_s):
                roles.kill("did not stop yet" if interrupts.urgent else f"did not stop within {grace_s:.0f} s")
            show()
    if roles.failed:
        _fail(buffer, run, roles.failed, view)


class _Reviver:
    """Restarts the embedded database when it was killed, a limited number of times.

    Raises:
        BufferUnavailableError: the database was stopped, or was killed too often.
    """

    def __init__(self, buffer: Buffer, run: Run, view: View) -> None:
        self._buffer, self._run, self._view = buffer, run, view
        self._left = _MAX_REVIVALS
        self._away_since: float | None = None

    def __call__(self) -> None:
        server = self._buffer.server
        if server is None or server.lives():
            self._away_since = None
            return
        now = time.monotonic()
        self._away_since = self._away_since or now
        killed = server.was_killed()
        if not killed or not self._left:
            if now - self._away_since > _STOPPED_S:
                why = "was killed too often, or does not start" if killed else "is stopped"
                raise BufferUnavailableError(
                    f"the database of the buffer {self._buffer.location} {why}: the run ends",
                    todo=f"continue from the last checkpoint: {_resume(self._buffer, self._run)} starts it again",
                )
            return
        self._left -= 1
        self._view.message("the database was killed: it is started again")
        try:
            server.start()
        except RftError as error:
            self._left = 0
            self._view.message(f"warning: the database does not start: {error}")


def _tell_stop(view: View, failed: dict[str, BaseException], grace_s: float) -> None:
    why = f"{', '.join(failed)} ended with an error" if failed else "interrupted"
    view.message(f"{why}: the other processes are asked to stop (up to {grace_s:.0f} s)")


class _StopRequest:
    """Asks the roles of a run to stop, in a thread: a role that was stopped within a transaction may hold what this waits for until it is killed."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._thread: threading.Thread | None = None

    def __call__(self) -> None:
        """Ask, unless the last time still waits."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._ask, name="stop-request", daemon=True)
            self._thread.start()

    def _ask(self) -> None:
        # The roles notice themselves that the database has failed; what conflicts is asked again.
        with contextlib.suppress(RftError):
            record_exited_workers(self._run)
            self._run.request_stop()


class _Display:
    """Shows the progress of a run, less often the longer that takes: a run of many steps must not pay for its display."""

    def __init__(self, progress: Progress, view: View, people: People) -> None:
        self._progress, self._view, self._people = progress, view, people
        self._next = 0.0

    def __call__(self) -> None:
        """Show it, unless it was shown a moment ago."""
        started = time.monotonic()
        if started < self._next:
            return
        try:
            snapshot = self._progress.snapshot()
            self._view.update(snapshot)
            self._people.update(snapshot)
        except BufferUnavailableError:
            self._view.message("the database does not answer")
        now = time.monotonic()
        self._next = now + (now - started) / _DISPLAY_SHARE


def _fail(buffer: Buffer, run: Run, failed: dict[str, BaseException], view: View) -> None:
    """Record why the run ended and raise it; only warn if the run had already finished."""
    name, error = next(iter(failed.items()))
    why = failure(error).rstrip(".")
    with contextlib.suppress(
        BufferUnavailableError
    ):  # its status stays `running`, and a resume finds that no process holds it
        ended = run.end("failed", f"the {name} {why}")
        # If no rollout succeeded, a trainer that meanwhile skipped all its steps has finished nothing.
        if not ended and not isinstance(error, RolloutsFailedError):
            view.message(f"warning: the run had finished when the {name} failed: it {why}; its results are complete")
            return
    if isinstance(error, RolloutsFailedError) and error.stack:
        view.message(error.stack)
    fix = "" if isinstance(error, RoleDiedError | RolloutsFailedError) else "correct the cause if you can, then "
    raise RoleFailedError(
        f"the {name} of the run {run.name!r} {why}",
        todo=f"{fix}continue from the last checkpoint: {_resume(buffer, run)}",
    ) from error


def _conclude(buffer: Buffer, run: Run, view: View, interrupts: Interrupts, seconds: float) -> int:
    try:
        state = run.refreshed()
        if state.status != "finished":
            outcome = interrupts.reason if interrupts.stop else "its roles ended without finishing"
            run.end("interrupted", outcome)
            view.message(f"{outcome}; continue with: {_resume(buffer, run)}")
            return interrupts.exit_code if interrupts.stop else 1
    except BufferUnavailableError:
        if not interrupts.stop:
            raise
        # The signal stopped the database too; a resume finds that no process holds the run.
        view.message(f"{interrupts.reason}, and so was the database; continue with: {_resume(buffer, run)}")
        return interrupts.exit_code
    view.message(f"finished in {seconds / 60:.1f} minutes: {state.outcome}")
    show_results(buffer, run, view)
    return 0


def _resume(buffer: Buffer, run: Run) -> str:
    """Return the command that continues a run, for use in the current folder."""
    return f"rft run --resume {run.name}{buffer_option(buffer.location)}"
